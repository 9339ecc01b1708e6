"""Experts that are split along their inner size over the ranks of a lane."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_serve.experts.bank import ExpertBank
from moe_serve.kernels.combine import weigh_rows, weigh_slots
from moe_serve.kernels.permute import Permutation, permute
from moe_serve.kernels.take_rows import take_rows
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.shard import split
from moe_serve.routing.packing import pack, unpack
from moe_serve.routing.router import Routing

# Shapes: T own tokens, C capacity, D model, K top-k, F expert inner, f this rank's part of it,
# S ranks of the lane, N = S * C tokens of the lane (padded), R rows sorted by expert.


@dataclasses.dataclass(frozen=True, slots=True)
class _LaneRows:
    """A row for each (token, slot) of the lane, sorted by expert; those of padding come last."""

    rows_RD: Tensor
    permutation: Permutation
    weights_NK: Tensor


class TensorParallelExperts:
    """Every rank computes its part of every expert, for all tokens of the lane.

    The parts of the sum are added in fp32, in order of rank. `deterministic`: activations are
    exchanged instead, and each token's home rank has the whole down projection: no sum crosses
    ranks, so the result is the one of a single rank, bit for bit.
    """

    def __init__(self, lane: RankGroup, *, deterministic: bool) -> None:
        self.lane = lane
        self.deterministic = deterministic

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        bank: ExpertBank,
        capacity: int,
        rows_1: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of each own token's experts -> [T, D] in x's dtype.

        `capacity`: the largest T of any rank of the lane.
        """
        rows = self._gather(x_TD, routing, bank.num_experts, capacity)
        if self.deterministic:
            return self._project_at_home(rows, routing, bank)
        return self._add_parts(rows, bank)[: x_TD.shape[0]].to(x_TD.dtype)

    def _gather(self, x_TD: Tensor, routing: Routing, num_experts: int, capacity: int) -> _LaneRows:
        num_tokens, top_k = routing.ids_TK.shape
        missing = (0, 0, 0, capacity - num_tokens)
        assert missing[3] >= 0, f"{num_tokens} tokens do not fit a capacity of {capacity}"
        parts = (
            F.pad(x_TD, missing),
            F.pad(routing.weights_TK, missing),
            F.pad(routing.ids_TK.to(torch.int16), missing, value=-1),
        )
        gathered = self.lane.all_gather(pack(*parts))
        shapes = ((part.shape[1], part.dtype) for part in parts)
        x_ND, weights_NK, ids_NK = unpack(gathered, *shapes)
        permutation = permute(ids_NK, num_experts)
        rows_RD = take_rows(x_ND, permutation.order_R, top_k)
        return _LaneRows(rows_RD, permutation, weights_NK)

    def _add_parts(self, rows: _LaneRows, bank: ExpertBank) -> Tensor:
        """[C, D] in fp32: this rank's tokens, with padding."""
        order_R, counts_E = rows.permutation.order_R, rows.permutation.counts_E
        # Padding weighs nothing, whatever stands in its slots.
        parts = bank(rows.rows_RD, counts_E, scatter_R=order_R)
        parts_NKD = parts.view(*rows.weights_NK.shape, parts.shape[1])
        return self.lane.reduce_scatter(weigh_slots(parts_NKD, rows.weights_NK))

    def _project_at_home(self, rows: _LaneRows, routing: Routing, bank: ExpertBank) -> Tensor:
        acts = bank.activate(rows.rows_RD, rows.permutation.counts_E)
        acts = acts.index_select(0, rows.permutation.inverse_R)
        num_own, home_slots = routing.ids_TK.numel(), len(acts) // self.lane.size
        acts = self._exchange_columns(acts, home_slots, bank.down_inner_size)[:num_own]
        permutation = permute(routing.ids_TK, bank.num_experts)
        out_RD = bank.project(acts.index_select(0, permutation.order_R), permutation.counts_E)
        return weigh_rows(out_RD, permutation.inverse_R, routing.weights_TK)

    def _exchange_columns(self, acts: Tensor, home_slots: int, inner_size: int) -> Tensor:
        """[N * K, f], own columns of all slots -> [C * K, F], all columns of the own slots.

        Flat, since the ranks' parts of F may differ by one.
        """
        size = self.lane.size
        widths = [split(inner_size, rank, size).size for rank in range(size)]
        assert acts.shape[1] == widths[self.lane.rank]
        received = [home_slots * width for width in widths]
        sent = [home_slots * acts.shape[1]] * size
        parts = torch.split(self.lane.all_to_all(acts.flatten(), sent, received), received)
        return torch.cat(
            [part.view(home_slots, width) for part, width in zip(parts, widths, strict=True)], dim=1
        )
