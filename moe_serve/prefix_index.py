"""Which block holds the keys and values of which tokens."""

from __future__ import annotations

import array
import dataclasses
import hashlib
from collections.abc import Sequence

ROOT_DIGEST = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockContent:
    """What a full block holds: its tokens, after everything that `parent_digest` stands for.

    Keys and values depend on all tokens before them, so a block is only known by the whole chain.
    """

    digest: bytes
    parent_digest: bytes
    token_ids: tuple[int, ...]

    @classmethod
    def after(cls, parent_digest: bytes, token_ids: Sequence[int]) -> BlockContent:
        return cls(
            digest=hash_block(parent_digest, token_ids),
            parent_digest=parent_digest,
            token_ids=tuple(token_ids),
        )


def hash_block(parent_digest: bytes, token_ids: Sequence[int]) -> bytes:
    tokens = array.array("q", token_ids).tobytes()
    return hashlib.blake2b(parent_digest + tokens, digest_size=32).digest()


class PrefixIndex:
    """Content -> block id, and back. A content has at most one block; the first one stays.

    A hit compares the whole content, not only the digest: two contents with one digest
    are a miss for the second, never the wrong block.
    """

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._contents: dict[int, BlockContent] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._contents

    def find(self, content: BlockContent) -> int | None:
        block_id = self._block_ids.get(content.digest)
        if block_id is None or self._contents[block_id] != content:
            return None
        return block_id

    def content_of(self, block_id: int) -> BlockContent | None:
        return self._contents.get(block_id)

    def insert(self, block_id: int, content: BlockContent) -> None:
        """Remember the block, unless its digest is taken."""
        assert block_id not in self._contents, f"block {block_id} has an identity already"
        if content.digest not in self._block_ids:
            self._block_ids[content.digest] = block_id
            self._contents[block_id] = content

    def discard(self, block_id: int) -> None:
        """Forget what the block holds, if anything was known of it."""
        content = self._contents.pop(block_id, None)
        if content is not None:
            del self._block_ids[content.digest]

    def check_integrity(self) -> None:
        """Assert that both directions agree and that every digest is that of its content."""
        assert len(self._block_ids) == len(self._contents)
        for block_id, content in self._contents.items():
            assert self._block_ids[content.digest] == block_id, f"block {block_id} is not indexed"
            expected = hash_block(content.parent_digest, content.token_ids)
            assert content.digest == expected, f"block {block_id} has another content's digest"
