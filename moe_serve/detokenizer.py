"""Tokens of one sequence back to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """What turning tokens into text needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Feeds the bytes of tokens through an incremental UTF-8 decoder.

    Text comes out as soon as its characters are whole and never changes afterwards. Bytes that
    cannot become a character turn into U+FFFD; so do the bytes of a character that is still open
    at `flush`. The joined output depends on the tokens alone, not on how they were grouped.
    Cost: O(bytes of the new tokens).
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._hidden_ids = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        return self._decoder.decode(
            b"".join(self._token_bytes(i) for i in token_ids if i not in self._hidden_ids)
        )

    def flush(self) -> str:
        """End of the sequence: what an open character turns into, usually nothing."""
        return self._decoder.decode(b"", final=True)
