"""The bytes that each token stands for in running text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

Speller = Callable[[str], bytes]

# Decoder steps that work on one token at a time, or (Strip, Fuse) only touch where a whole text
# begins and how pieces are joined, which is of no concern in running text.
_PIECEWISE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
_MAX_ID = 2**32 - 1  # the backend counts in 32 bits
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps a token id to its exact bytes; joined bytes of a sequence are its text in UTF-8.

    Three kinds of tokenizer, told apart by the backend's decoder:

    - byte-level BPE (GPT-2, Qwen, OLMoE, DeepSeek): each letter of a token names one byte.
      Added tokens are literal text.
    - SentencePiece style (Mixtral, Llama): `▁` is a space, `<0xE4>` is a byte. Unlike a decoded
      text as a whole, the first token keeps its leading space. Special tokens are literal text.
    - any other: what the token adds to a text when it follows itself. Exact for decoders such as
      WordPiece's; where a decoder looks at the next token, an approximation.

    Ids that the tokenizer lacks (a model's padded vocabulary, gaps, negative ones) give b"".
    Safe to share between threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        steps = _decoder_steps(backend)
        added = backend.get_added_tokens_decoder()
        self._spell: Speller | None = None
        self._literal_ids: frozenset[int] = frozenset()
        if any(step["type"] == "ByteLevel" for step in steps):
            self._spell = spell_byte_level
            self._literal_ids = frozenset(added)
        elif steps and all(_is_piecewise(step) for step in steps):
            self._spell = _piecewise_speller(steps)
            self._literal_ids = frozenset(i for i, token in added.items() if token.special)
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is not None:
            return found
        token = self._backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None
        if token is None:
            return b""  # not remembered: ids come from clients, and there are many absent ones
        found = self._known[token_id] = self._spell_token(token_id, token)
        return found

    def _spell_token(self, token_id: int, token: str) -> bytes:
        if token_id in self._literal_ids:
            return token.encode()
        if self._spell is not None:
            return self._spell(token)
        return self._decoded_difference(token_id).encode()

    def _decoded_difference(self, token_id: int) -> str:
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as a flat list of its steps; empty without a decoder."""
    if backend.decoder is None:
        return []
    return _flatten(json.loads(backend.decoder.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _is_piecewise(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    return step["type"] in _PIECEWISE


def _piecewise_speller(steps: list[dict[str, Any]]) -> Speller:
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def spell(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return spell


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 letters name themselves, the other bytes get the
    code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return letters


_BYTE_OF_LETTER = _byte_letters()


def spell_byte_level(token: str) -> bytes:
    """Bytes of a byte-level token; one with letters outside the alphabet is literal text.

    >>> spell_byte_level("Ġä¸ĸ")
    b' \\xe4\\xb8\\x96'
    """
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()
