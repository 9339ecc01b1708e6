"""Ranks that exchange tensors: the few collectives that everything above is built from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Shapes: n rows of one rank, S ranks of the group.


class RankGroup:
    """`rank` is this one's place among `size`. Every rank makes the same calls in the same order.

    A group of one moves nothing. Each call has the deadline that the process group was made with;
    past it, or when a peer dies, it raises torch's RuntimeError, and the rank is of no more use.
    `bytes_sent` counts what left this rank for others.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.bytes_sent = 0
        # gloo's own sum takes 1.3 to 4 times as long as an all-to-all and a local sum
        # (BENCHMARKS.md).
        self._sums_by_all_to_all = (
            process_group is not None and dist.get_backend(process_group) == "gloo"
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of each rank, n equal everywhere -> [S * n, ...] in order of rank."""
        if self.size == 1:
            return x
        self.bytes_sent += x.nbytes * (self.size - 1)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, x.contiguous(), group=self._group)
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
        if self.size == 1:
            return x
        x = x.contiguous()
        if send_counts is None or receive_counts is None:
            assert x.shape[0] % self.size == 0
            out = torch.empty_like(x)
            self.bytes_sent += x.nbytes // self.size * (self.size - 1)
            dist.all_to_all_single(out, x, group=self._group)
            return out
        assert sum(send_counts) == x.shape[0]
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        row_bytes = x[:1].nbytes
        self.bytes_sent += row_bytes * (x.shape[0] - send_counts[self.rank])
        dist.all_to_all_single(out, x, list(receive_counts), list(send_counts), group=self._group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over ranks of [S * n, ...] -> this rank's n rows of it, in x's dtype.

        Added in fp32 in order of rank: a library's ring adds each part in an order of its own, so
        that a token's bits would depend on its place in the batch.
        """
        if self.size == 1:
            return x
        parts = self.all_to_all(x).view(self.size, -1, *x.shape[1:])
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def sum_disjoint(self, x: Tensor) -> Tensor:
        """`reduce_scatter` where at most one rank has something else than zero bits at a place.

        Added as integers, which is exact whatever the order; so the library's own sum may be used.
        """
        if self.size == 1:
            return x
        bits = x.contiguous().view(torch.uint8).flatten(1)
        wide = bits.view(torch.int32) if bits.shape[1] % 4 == 0 else bits
        if self._sums_by_all_to_all:
            parts = self.all_to_all(wide).view(self.size, -1, wide.shape[1])
            total = parts.sum(0, dtype=wide.dtype)
        else:
            total = wide.new_empty((wide.shape[0] // self.size, wide.shape[1]))
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(total, wide, group=self._group)
            self.bytes_sent += wide.nbytes // self.size * (self.size - 1)
        summed: Tensor = total.view(torch.uint8).view(x.dtype).view(-1, *x.shape[1:])
        return summed

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's x, shapes equal, at rank 0 of the group; None at the others."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self.bytes_sent += 0 if self.rank == 0 else x.nbytes
        dist.gather(x, parts, group=self._group, group_dst=0)
        return parts


SOLO = RankGroup()
