"""Who holds which KV blocks, and which blocks can be shared."""

from __future__ import annotations

import dataclasses

from moe_serve.block_pool import FreeBlocks
from moe_serve.prefix_index import ROOT_DIGEST, BlockContent, PrefixIndex
from moe_serve.request import Request, no_blocks


@dataclasses.dataclass(slots=True)
class _Chain:
    """Contents of a request's full blocks, as far as hashed; the first `num_indexed` of them
    have been offered to the index."""

    contents: list[BlockContent] = dataclasses.field(default_factory=list)
    num_indexed: int = 0


class BlockManager:
    """Paged KV blocks with reference counts and prefix caching. All ids [0, num_blocks) are used.

    A block is in one of three states:

        referenced   by one or more running requests; only the one that computes it writes to it
        cached       free, but its content is known: a hit takes it back, the oldest is reused first
        blank        free, content worth nothing: reused before any cached one

    `can_x` changes nothing that can be seen; `x` never fails after it.
    Requests that are not admitted own no blocks. `admit`, `append` and `release` write
    `request.block_ids`, and `admit` also `request.num_computed_tokens`.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = FreeBlocks(num_blocks)
        self._num_refs = [0] * num_blocks
        self._index = PrefixIndex()
        self._chains: dict[str, _Chain] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, whether or not their content is still known."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def can_use_prefix(self, request: Request) -> bool:
        """Whether cached blocks may stand in for the request's own.

        Not while prompt logprobs are wanted, or routes: these need every prompt position computed.
        They are complete once there is an output token.
        """
        sampling = request.sampling
        wants_positions = sampling.prompt_logprobs is not None or sampling.return_routed_experts
        needs_prompt = wants_positions and not request.output_token_ids
        return self.enable_prefix_caching and not needs_prompt

    def find_prefix(self, request: Request) -> list[int]:
        """Ids of the cached blocks that hold the first tokens of the request, in order.

        Full blocks only, and never the last token: its logits are needed, and so at least one
        token is computed, in a block that nobody shares.
        """
        if not self.can_use_prefix(request):
            return []
        block_ids = []
        for content in self._contents(request, (request.num_tokens - 1) // self.block_size):
            block_id = self._index.find(content)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_admit(self, request: Request, num_spare_blocks: int = 0) -> bool:
        """Whether there are blocks for all tokens known so far, with `num_spare_blocks` left."""
        num_missing = self._num_blocks_for(request) + num_spare_blocks - len(self._free)
        if num_missing <= 0 or not self._free:
            return num_missing <= 0
        num_shared = sum(self._num_refs[block_id] > 0 for block_id in self.find_prefix(request))
        return num_missing <= num_shared

    def admit(self, request: Request) -> int:
        """Give the request blocks for all its known tokens; returns how many tokens were cached."""
        assert not request.block_ids, f"{request.request_id} holds blocks already"
        block_ids = self.find_prefix(request)
        for block_id in block_ids:
            self._take_cached(block_id)
        num_hits = len(block_ids)
        while len(block_ids) < self._num_blocks_for(request):
            block_ids.append(self._take_free())
        request.block_ids.extend(block_ids)
        request.num_computed_tokens = num_hits * self.block_size
        self._chain(request).num_indexed = num_hits
        return request.num_computed_tokens

    def has_slot(self, request: Request) -> bool:
        """Whether the request's blocks have a slot for its newest token."""
        return len(request.block_ids) * self.block_size >= request.num_tokens

    def can_append(self, request: Request) -> bool:
        """Whether there is a slot for the newest token of a request that holds the others."""
        return self.has_slot(request) or bool(self._free)

    def append(self, request: Request) -> None:
        """Make sure that the newest token has a slot."""
        if not self.has_slot(request):
            request.block_ids.append(self._take_free())
            assert self.has_slot(request)

    def cache_computed(self, request: Request) -> None:
        """Let others find the blocks of the request that are full and computed by now."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        chain = self._chain(request)
        if num_full > chain.num_indexed:
            contents = self._contents(request, num_full)
            for index in range(chain.num_indexed, num_full):
                self._index.insert(request.block_ids[index], contents[index])
            chain.num_indexed = num_full

    def release(self, request: Request) -> None:
        """Give back what the request holds, if anything, and forget the request.

        Last block first: a prefix is of use without its tail, so the tail is reused sooner.
        """
        for block_id in reversed(request.block_ids):
            self._drop(block_id)
        request.block_ids = no_blocks()
        self._chains.pop(request.request_id, None)

    def _num_blocks_for(self, request: Request) -> int:
        return -(-request.num_tokens // self.block_size)

    def _take_cached(self, block_id: int) -> None:
        if not self._num_refs[block_id]:
            self._free.remove(block_id)
        self._num_refs[block_id] += 1

    def _take_free(self) -> int:
        block_id = self._free.pop_front()
        # The block is about to be overwritten: whoever looks for its old content must miss.
        self._index.discard(block_id)
        self._num_refs[block_id] = 1
        return block_id

    def _drop(self, block_id: int) -> None:
        self._num_refs[block_id] -= 1
        assert self._num_refs[block_id] >= 0, f"block {block_id} was released twice"
        if self._num_refs[block_id]:
            return
        if block_id in self._index:
            self._free.push_back(block_id)
        else:
            self._free.push_front(block_id)

    def _chain(self, request: Request) -> _Chain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = _Chain()
        return chain

    def _contents(self, request: Request, num_blocks: int) -> list[BlockContent]:
        """Contents of the first `num_blocks` blocks; hashed once, however often asked for."""
        contents = self._chain(request).contents
        for start in range(len(contents) * self.block_size, num_blocks * self.block_size,
                           self.block_size):  # fmt: skip
            parent = contents[-1].digest if contents else ROOT_DIGEST
            token_ids = request.tokens_between(start, start + self.block_size)
            contents.append(BlockContent.after(parent, token_ids))
        return contents[:num_blocks]

    def num_references(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def check_integrity(self) -> None:
        """Assert that every block is either free or referenced, and that identities are right."""
        self._free.check_integrity()
        self._index.check_integrity()
        assert all(count >= 0 for count in self._num_refs), "negative reference count"
        for block_id, count in enumerate(self._num_refs):
            assert (count == 0) == (block_id in self._free), (
                f"block {block_id} has {count} references and is "
                f"{'' if block_id in self._free else 'not '}free"
            )

    def check_request(self, request: Request) -> None:
        """Assert that the request's blocks hold no identity but that of its own tokens."""
        for index, block_id in enumerate(request.block_ids):
            content = self._index.content_of(block_id)
            if content is not None:
                start = index * self.block_size
                token_ids = tuple(request.tokens_between(start, start + self.block_size))
                assert content.token_ids == token_ids, f"block {block_id} holds other tokens"
                assert start + self.block_size <= request.num_computed_tokens, (
                    f"block {block_id} can be found before it is computed"
                )
