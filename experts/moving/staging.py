"""Moves experts to this rank from others, and from it to others, while it serves."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import zmq

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.moving.checksum import checksum
from moe_serve.experts.moving.expert_fetch import ExpertFetch, ExpertSources, StagingState
from moe_serve.experts.moving.expert_server import ExpertServer
from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.experts.moving.weights import expert_weights

logger = logging.getLogger(__name__)


class ExpertStaging:
    """One rank's side of a move, by connections of its own: a rank that fails or is late breaks no
    collective, and a move can be dropped at any time.

        start -> fetched beside the weights in use -> apply, between two steps
                                                   -> drop, and all is as it was

    All ranks are driven alike: each starts, with copies or without, and once all are done, each
    applies; or each drops. Ranks that have applied less often than others give them nothing.

    `banks`: the experts of each MoE layer. `address`: of this host, as other ranks reach it.
    Threads of its own read banks, and write none; all methods are for one thread.
    """

    def __init__(self, banks: Sequence[ExpertBank], rank: int, address: str) -> None:
        self._banks = banks
        self._rank = rank
        self._addresses: tuple[str, ...] = ()
        self._numbers = itertools.count()
        self._fetch: ExpertFetch | None = None
        self._context = zmq.Context()
        try:
            self._server = ExpertServer(banks, self._context, address)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def address(self) -> str:
        """Where this rank gives its weights."""
        address: str = self._server.address
        return address

    def connect(self, addresses: Sequence[str]) -> None:
        """`addresses` of all ranks, in order."""
        assert addresses[self._rank] == self.address
        self._addresses = tuple(addresses)

    def start(self, copies: Sequence[ExpertCopy], timeout: float) -> None:
        """Begin to fetch; after `timeout` seconds in all, that is an error."""
        assert self._fetch is None, "what was staged is neither applied nor dropped"
        targets = {(copy.layer, copy.slot) for copy in copies}
        assert len(targets) == len(copies), "a slot is to be filled twice"
        assert all(0 <= slot < self._banks[layer].num_experts for layer, slot in targets)
        sources = ExpertSources(
            rank=self._rank,
            banks=self._banks,
            addresses=self._addresses,
            context=self._context,
            numbers=self._numbers,
        )
        self._fetch = ExpertFetch(sources, copies, self._server.version, timeout)

    def state(self) -> StagingState:
        """Of what was started; without it, nothing is done. Waits for nothing."""
        state = StagingState() if self._fetch is None else self._fetch.state()
        return state._replace(error=state.error or self._server.error)

    def apply(self) -> None:
        """Put what is staged, and done, in its slots, and forget it. No step may run meanwhile."""
        assert self._fetch is not None
        staged = self._fetch.staged
        with self._server.switching():
            for copy, matrices in staged.items():
                weights = expert_weights(self._banks[copy.layer], copy.slot)
                for target, source in zip(weights, matrices, strict=True):
                    # sync: between two steps; others may ask for the new weights right after.
                    target.copy_(source)
        self.drop()

    def drop(self) -> None:
        """Fetch no more, and forget what was staged, if anything was."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None and not fetch.stop():
            logger.error("a thread that fetches experts does not end")

    def checksums(self) -> list[list[int]]:
        """Of the weights in use, by layer and slot. On a GPU, copies all to the host."""
        return [
            [checksum(*expert_weights(bank, slot)) for slot in range(bank.num_experts)]
            for bank in self._banks
        ]

    def close(self) -> None:
        """Drop what is staged, and give nothing any more."""
        fetch, self._fetch = self._fetch, None
        has_ended = fetch is None or fetch.stop()
        if self._server.close() and has_ended:
            self._context.destroy(linger=0)
        else:
            # Ending the context would wait for their sockets.
            logger.error("a thread that moves experts does not end")
