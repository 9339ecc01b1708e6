"""What ranks that move experts ask each other for: pieces of an expert's weights, and answers.

Pieces, since Python holds its lock while it fills a message: a step must not wait for a whole
expert of many megabytes, and a rank that stops asking should get no more than a few.

    asks     [PieceRequest]
    answers  [PieceHeader, the bytes]      in any order; no bytes where the header tells an error
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

PIECE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PieceRequest:
    """Bytes `start` to `stop` of one of the expert's matrices, in the order of `expert_weights`.

    `number` is the asker's own, for the answer. `version` of the weights that it wants.
    """

    number: int
    version: int
    layer: int
    slot: int
    matrix: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PieceHeader:
    """`kind`: see `expert_kind`. `checksum` of the bytes that follow; `error`: why none do."""

    number: int
    kind: str = ""
    checksum: int = 0
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(PieceRequest)
_header_decoder = msgspec.msgpack.Decoder(PieceHeader)


def encode(message: PieceRequest | PieceHeader) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> PieceRequest:
    """Raises `msgspec.MsgspecError`."""
    return _request_decoder.decode(data)


def decode_header(data: bytes) -> PieceHeader:
    """Raises `msgspec.MsgspecError`."""
    return _header_decoder.decode(data)


def ranges(num_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the pieces of that many bytes."""
    for start in range(0, num_bytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, num_bytes)
