"""Gives other ranks the weights of this rank's experts, piece by piece, in a thread of its own."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import zmq

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.moving.pieces import (
    PieceHeader,
    PieceRequest,
    decode_request,
    encode,
)
from moe_serve.experts.moving.weights import (
    expert_kind,
    expert_weights,
    flat_bytes,
    host_bytes,
    side_stream,
)

logger = logging.getLogger(__name__)

_POLL_MS = 100
# Between looks at whether this rank has switched, while another waits for that.
_WAIT_MS = 2
_MAX_REQUEST_BYTES = 1024
# Answers that a rank may leave lying, and requests that may wait: more than ranks ask for at once.
_MAX_ANSWERS = 64
_MAX_WAITING = 1024
_JOIN_SECONDS = 5.0


class _Waiting(NamedTuple):
    peer: bytes
    request: PieceRequest


class ExpertServer:
    """Listens at `address` on a free port. No weights but those of the asked version leave it.

    `version` counts 2 a switch and is odd during one. Ranks switch in the same order, not at the
    same moment: who asks for a later version waits for this rank, who asks for an earlier one is
    refused, and so is one whose weights changed while they were read.
    """

    def __init__(
        self, banks: Sequence[ExpertBank], context: zmq.Context[Any], address: str
    ) -> None:
        self.version = 0
        self.error: str | None = None
        self._banks = banks
        self._kinds = [expert_kind(bank) for bank in banks]
        self._stream = side_stream(banks)
        self._waiting: collections.deque[_Waiting] = collections.deque(maxlen=_MAX_WAITING)
        self._is_closing = False
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_ANSWERS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        self._socket.bind(f"tcp://{address}:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="expert-server", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Weights may change inside. An error leaves them unfit for others: none are given."""
        self.version += 1
        yield
        self.version += 1

    def close(self) -> bool:
        """Whether the thread has ended, and with it the socket."""
        self._is_closing = True
        self._thread.join(_JOIN_SECONDS)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                while not self._is_closing:
                    if self._socket.poll(_WAIT_MS if self._waiting else _POLL_MS):
                        self._take()
                    self._answer_waiting()
        except Exception as error:
            logger.exception("giving experts to other ranks failed")
            self.error = f"giving experts to other ranks failed: {error!r}"
        finally:
            self._socket.close()

    def _take(self) -> None:
        peer, *frames = self._socket.recv_multipart()
        try:
            (data,) = frames
            self._waiting.append(_Waiting(peer, decode_request(data)))
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("not a request for experts: %s", error)

    def _answer_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if waiting.request.version > self.version:
                self._waiting.append(waiting)
            else:
                self._send(waiting.peer, *self._answer(waiting.request))

    def _send(self, peer: bytes, header: PieceHeader, body: zmq.Frame) -> None:
        self._socket.send_multipart([peer, encode(header), body], copy=False)

    def _answer(self, request: PieceRequest) -> tuple[PieceHeader, zmq.Frame]:
        try:
            return self._read(request)
        except Exception as error:
            logger.exception("reading an expert for another rank failed")
            return _refuse(request, f"reading it failed: {error!r}")

    def _read(self, request: PieceRequest) -> tuple[PieceHeader, zmq.Frame]:
        layer, slot = request.layer, request.slot
        if not (0 <= layer < len(self._banks) and 0 <= slot < self._banks[layer].num_experts):
            return _refuse(request, "it has no such slot")
        weights = expert_weights(self._banks[layer], slot)[request.matrix]
        data = host_bytes(flat_bytes(weights)[request.start : request.stop])
        # From here on nothing can change the bytes: the checksum is that of what is sent.
        body = zmq.Frame(data, copy=True)
        header = PieceHeader(
            number=request.number, kind=self._kinds[layer], checksum=zlib.crc32(body.buffer)
        )
        if self.version != request.version:
            return _refuse(request, "its experts have moved on")
        return header, body


def _refuse(request: PieceRequest, why: str) -> tuple[PieceHeader, zmq.Frame]:
    return PieceHeader(number=request.number, error=why), zmq.Frame()
