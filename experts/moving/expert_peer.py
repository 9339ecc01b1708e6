"""Another rank, as one sees it that fetches experts from it.

to ask -> asked, a few at once -> checked, and written where the expert is staged
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.experts.moving.pieces import (
    PIECE_BYTES,
    PieceHeader,
    PieceRequest,
    decode_header,
    encode,
)
from moe_serve.experts.moving.weights import Bytes

# Pieces asked for at once: enough that neither the other rank nor the network idles.
_WINDOW = 4
# No piece comes near it; ZMQ hangs up on who sends more.
_MAX_ANSWER_BYTES = 4 * PIECE_BYTES


class TransferError(Exception):
    """Why experts do not come. The message names the rank, and layer and slot if it is one."""


class WantedPiece(NamedTuple):
    """Bytes `start` to `start + len(target)` of the expert's `matrix` belong into `target`."""

    copy: ExpertCopy
    kind: str
    matrix: int
    start: int
    target: Bytes


class ExpertPeer:
    """Asks `rank` for pieces of the weights of one `version`, by a DEALER `socket` that is not
    connected yet. Requests are numbered by `numbers`, so that no answer is ever mistaken for that
    to an earlier one. For one thread.
    """

    def __init__(
        self, rank: int, socket: zmq.Socket[Any], version: int, numbers: Iterator[int]
    ) -> None:
        self.socket = socket
        self.num_bytes = 0
        self._rank = rank
        self._version = version
        self._numbers = numbers
        self._to_ask: collections.deque[WantedPiece] = collections.deque()
        self._asked: dict[int, WantedPiece] = {}
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)

    def want(self, piece: WantedPiece) -> None:
        self._to_ask.append(piece)

    @property
    def missing(self) -> WantedPiece | None:
        """The piece that has been asked for longest, or None when all are there."""
        return next(iter(self._asked.values()), None)

    def ask(self) -> None:
        while self._to_ask and len(self._asked) < _WINDOW:
            piece = self._to_ask.popleft()
            number = next(self._numbers)
            request = PieceRequest(
                number=number,
                version=self._version,
                layer=piece.copy.layer,
                slot=piece.copy.source_slot,
                matrix=piece.matrix,
                start=piece.start,
                stop=piece.start + len(piece.target),
            )
            self.socket.send(encode(request), zmq.NOBLOCK)
            self._asked[number] = piece

    def take(self) -> None:
        """One answer that has arrived. Raises `TransferError` if it is not what was asked for."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        try:
            head, body = frames
            header = decode_header(head.bytes)
            piece = self._asked.pop(header.number)
        except (ValueError, msgspec.MsgspecError, KeyError) as error:
            why = f"rank {self._rank} sent what nobody asked for: {error!r}"
            raise TransferError(why) from None
        _check(piece, header, body)
        np.copyto(piece.target, np.frombuffer(body.buffer, dtype=np.uint8))
        self.num_bytes += len(piece.target)


def _check(piece: WantedPiece, header: PieceHeader, body: zmq.Frame) -> None:
    if header.error is not None:
        raise failed(piece.copy, header.error)
    if header.kind != piece.kind:
        raise failed(piece.copy, f"its experts are {header.kind}, those of this rank {piece.kind}")
    if len(body) != len(piece.target):
        raise failed(piece.copy, f"it sent {len(body)} bytes instead of {len(piece.target)}")
    if zlib.crc32(body.buffer) != header.checksum:
        raise failed(piece.copy, "bytes changed on the way: their checksum differs")


def failed(copy: ExpertCopy, why: str) -> TransferError:
    return TransferError(
        f"layer {copy.layer}, slot {copy.slot}: no expert from slot {copy.source_slot} of rank "
        f"{copy.source_rank}: {why}"
    )
