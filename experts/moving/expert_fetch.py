"""Brings the weights of experts beside those in use, in a thread of its own."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.moving.expert_peer import ExpertPeer, TransferError, WantedPiece, failed
from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.experts.moving.pieces import ranges
from moe_serve.experts.moving.weights import expert_kind, expert_weights, host_bytes, side_stream

logger = logging.getLogger(__name__)

_POLL_MS = 50
_JOIN_SECONDS = 5.0

# The matrices of each copy's expert, in host memory.
Staged = dict[ExpertCopy, list[Tensor]]


class StagingState(NamedTuple):
    """Done, at work, or why it failed. `num_bytes` came from other ranks."""

    is_done: bool = False
    num_bytes: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSources:
    """Where `rank` gets weights from: of other ranks by `addresses`, its own from its `banks`.

    `numbers` are those of requests, never used twice.
    """

    rank: int
    banks: Sequence[ExpertBank]
    addresses: Sequence[str]
    context: zmq.Context[Any]
    numbers: Iterator[int]


class _Stopped(Exception):
    """Nobody wants the experts any more."""


class ExpertFetch:
    """Begins at once; ends when all is there, at the first error, after `timeout` seconds, or when
    it is stopped. `version`: which weights are meant (see `ExpertServer`).
    """

    def __init__(
        self, sources: ExpertSources, copies: Sequence[ExpertCopy], version: int, timeout: float
    ) -> None:
        self._sources = sources
        self._copies = copies
        self._version = version
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._staged: Staged = {}
        self._peers: dict[int, ExpertPeer] = {}
        self._stream = side_stream(sources.banks)
        self._is_stopped = False
        self._is_done = False
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="expert-fetch", daemon=True)
        self._thread.start()

    def state(self) -> StagingState:
        # The thread adds peers meanwhile.
        num_bytes = sum(peer.num_bytes for peer in list(self._peers.values()))
        return StagingState(self._is_done, num_bytes, self._error)

    @property
    def staged(self) -> Staged:
        assert self._is_done
        return self._staged

    def stop(self) -> bool:
        """Whether the thread has ended, and with it its sockets: but for a device that hangs."""
        self._is_stopped = True
        self._thread.join(_JOIN_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                self._fetch()
            self._is_done = True
        except _Stopped:
            pass
        except TransferError as error:
            self._error = str(error)
        except Exception as error:
            logger.exception("fetching experts failed")
            self._error = f"fetching experts failed: {error!r}"
        finally:
            for peer in self._peers.values():
                peer.socket.close()

    def _fetch(self) -> None:
        for copy in self._copies:
            self._check_time(copy)
            bank = self._sources.banks[copy.layer]
            self._staged[copy] = [_empty_like(weights) for weights in expert_weights(bank, 0)]
            if copy.source_rank != self._sources.rank:
                self._want(copy)
        for peer in self._peers.values():
            peer.ask()
        for copy in self._copies:
            if copy.source_rank == self._sources.rank:
                self._check_time(copy)
                self._copy_own(copy)
        self._receive()

    def _want(self, copy: ExpertCopy) -> None:
        peer = self._peer(copy.source_rank)
        kind = expert_kind(self._sources.banks[copy.layer])
        for matrix, staged in enumerate(self._staged[copy]):
            target = host_bytes(staged)
            for start, stop in ranges(len(target)):
                peer.want(WantedPiece(copy, kind, matrix, start, target[start:stop]))

    def _peer(self, rank: int) -> ExpertPeer:
        if rank not in self._peers:
            socket = self._sources.context.socket(zmq.DEALER)
            self._peers[rank] = ExpertPeer(rank, socket, self._version, self._sources.numbers)
            socket.connect(self._sources.addresses[rank])
        return self._peers[rank]

    def _copy_own(self, copy: ExpertCopy) -> None:
        weights = expert_weights(self._sources.banks[copy.layer], copy.source_slot)
        for staged, source in zip(self._staged[copy], weights, strict=True):
            # By numpy: a thread's first copy by torch would start threads of its own.
            np.copyto(host_bytes(staged), host_bytes(source))

    def _receive(self) -> None:
        by_socket = {peer.socket: peer for peer in self._peers.values()}
        poller = zmq.Poller()
        for socket in by_socket:
            poller.register(socket, zmq.POLLIN)
        while missing := [piece for peer in by_socket.values() if (piece := peer.missing)]:
            self._check_time(missing[0].copy)
            for socket, _ in poller.poll(_POLL_MS):
                by_socket[socket].take()
                by_socket[socket].ask()

    def _check_time(self, copy: ExpertCopy) -> None:
        if self._is_stopped:
            raise _Stopped
        if time.monotonic() > self._deadline:
            raise failed(copy, f"not all was there within {self._timeout:g} s")


def _empty_like(weights: Tensor) -> Tensor:
    return torch.empty(weights.shape, dtype=weights.dtype, pin_memory=weights.is_cuda)
