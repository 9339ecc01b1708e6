"""Ranks that exchange tensors: the few collectives that everything above is built from."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_serve.parallel.collectives import Collectives
from moe_serve.parallel.comm_log import CommLog, GroupCommunication, Operation

# Shapes: n rows of one rank, S ranks of the group.


class RankGroup:
    """`rank` is this one's place among `size`. Every rank makes the same calls in the same order.

    A group of one moves nothing. How the others do, and how they fail, is told in `Collectives`.
    `log` tells what that moved.
    """

    def __init__(self, collectives: Collectives | None = None) -> None:
        self._collectives = collectives
        self.rank = 0 if collectives is None else collectives.rank
        self.size = 1 if collectives is None else collectives.size
        self.log = CommLog()

    @property
    def bytes_sent(self) -> int:
        """What left this rank for others, as far as `log` goes back."""
        return self.log.bytes_sent

    def communication(self, name: str) -> GroupCommunication:
        """What `log` tells, of the group by that name."""
        backend = "none" if self._collectives is None else self._collectives.name
        return GroupCommunication(group=name, backend=backend, size=self.size, rows=self.log.rows())

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of each rank, n equal everywhere -> [S * n, ...] in order of rank."""
        if self._collectives is None:
            return x
        start = time.perf_counter()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._collectives.all_gather(out, x.contiguous())
        self._note("all_gather", x, x.nbytes * (self.size - 1), start)
        return out

    def all_to_all(
        self,
        x: Tensor,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Rows [R, ...], sorted by destination -> the rows meant for this rank, in order of source.

        Without counts each rank gets R / S rows. With them, `send_counts[i]` rows go to rank i and
        `receive_counts[i]` come from it; any of them may be 0.
        """
        if self._collectives is None:
            return x
        start = time.perf_counter()
        if send_counts is None or receive_counts is None:
            assert x.shape[0] % self.size == 0
            send_counts = receive_counts = [x.shape[0] // self.size] * self.size
        assert sum(send_counts) == x.shape[0]
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        self._collectives.all_to_all(out, x.contiguous(), receive_counts, send_counts)
        self._note("all_to_all", x, x[:1].nbytes * (x.shape[0] - send_counts[self.rank]), start)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over ranks of [S * n, ...] -> this rank's n rows of it, in x's dtype.

        Added in fp32 in order of rank: otherwise a token's bits would depend on its place in the
        batch.
        """
        if self._collectives is None:
            return x
        start = time.perf_counter()
        out = self._own_part(x)
        self._collectives.reduce_scatter(out, x.contiguous())
        self._note("reduce_scatter", x, out.nbytes * (self.size - 1), start)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, the same at each of them, added as `reduce_scatter` does."""
        if self._collectives is None:
            return x
        start = time.perf_counter()
        out = x.clone(memory_format=torch.contiguous_format)
        self._collectives.all_reduce(out)
        self._note("all_reduce", x, x.nbytes * (self.size - 1), start)
        return out

    def sum_disjoint(self, x: Tensor) -> Tensor:
        """`reduce_scatter` where at most one rank has something else than zero bits at a place.

        Added as integers, which is exact whatever the order.
        """
        if self._collectives is None:
            return x
        start = time.perf_counter()
        bits = x.contiguous().view(torch.uint8).flatten(1)
        wide = bits.view(torch.int32) if bits.shape[1] % 4 == 0 else bits
        out = self._own_part(wide)
        self._collectives.sum_bits(out, wide)
        self._note("sum_disjoint", x, out.nbytes * (self.size - 1), start)
        summed: Tensor = out.view(torch.uint8).view(x.dtype).view(-1, *x.shape[1:])
        return summed

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's x, shapes equal, at rank 0 of the group; None at the others."""
        if self._collectives is None:
            return [x]
        start = time.perf_counter()
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._collectives.gather(parts, x)
        self._note("gather", x, 0 if self.rank == 0 else x.nbytes, start)
        return parts

    def close(self) -> None:
        """Give up what the group holds. Does not wait for the others."""
        if self._collectives is not None:
            self._collectives.close()

    def _note(self, operation: Operation, x: Tensor, bytes_sent: int, start: float) -> None:
        # A call for a GPU returns before it is done.
        seconds = time.perf_counter() - start if x.is_cpu else None
        self.log.note(operation, x.nbytes, bytes_sent, seconds)

    def _own_part(self, x: Tensor) -> Tensor:
        """Room for this rank's [n, ...] of [S * n, ...]."""
        assert x.shape[0] % self.size == 0
        return x.new_empty((x.shape[0] // self.size, *x.shape[1:]))


SOLO = RankGroup()
