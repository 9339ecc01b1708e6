"""Collectives by a torch process group: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TorchCollectives:
    """See `Collectives`. The deadline is the one that the process group was made with."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        # What exchanges rows; DeepSpeed's module of the same functions may stand here.
        self._comm: Any = dist
        self.name: str = dist.get_backend(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        # gloo's own sum takes 1.3 to 4 times as long as an all-to-all and a local sum
        # (BENCHMARKS.md).
        self._sums_by_all_to_all = self.name == "gloo"

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        # Renamed in torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, x, group=self._group)

    def all_to_all(
        self, out: Tensor, x: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> None:
        counts = list(receive_counts), list(send_counts)
        self._comm.all_to_all_single(out, x, *counts, group=self._group)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        # A library's ring adds each part in an order of its own.
        out.copy_(sum_in_order(self._exchange(x)))

    def all_reduce(self, x: Tensor) -> None:
        parts = x.new_empty((self.size, *x.shape))
        self.all_gather(parts.flatten(0, 1), x)
        x.copy_(sum_in_order(parts))

    def sum_bits(self, out: Tensor, x: Tensor) -> None:
        if self._sums_by_all_to_all:
            torch.sum(self._exchange(x), 0, dtype=x.dtype, out=out)
        else:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(out, x, group=self._group)

    def gather(self, parts: list[Tensor] | None, x: Tensor) -> None:
        dist.gather(x, parts, group=self._group, group_dst=0)

    def close(self) -> None:
        """The process group is not ours alone: `world.leave` ends it."""

    def _exchange(self, x: Tensor) -> Tensor:
        """[S * n, ...] -> [S, n, ...]: each rank's part for this one, in order of rank."""
        parts = torch.empty_like(x)
        self._comm.all_to_all_single(parts, x, group=self._group)
        return parts.view(self.size, -1, *x.shape[1:])


def sum_in_order(parts: Tensor) -> Tensor:
    """Sum of [S, ...] over S in fp32, one after the other."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total
