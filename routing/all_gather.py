"""The dispatcher with static shapes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_serve.kernels.combine import weigh_slots
from moe_serve.kernels.permute import permute
from moe_serve.kernels.take_rows import take_rows
from moe_serve.parallel.group import RankGroup
from moe_serve.routing.dispatch import Dispatched
from moe_serve.routing.expert_map import ReplicaTurns
from moe_serve.routing.packing import pack, unpack
from moe_serve.routing.router import Routing

# Shapes: T own tokens, C capacity, D model, K top-k, E logical experts, S ranks,
# N = S * C tokens of all ranks, R rows computed here.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllGathered(Dispatched):
    """`order_R`: the flat (token of all ranks, slot) index that each row came from."""

    order_R: Tensor
    num_slots: int
    weights_TK: Tensor


class AllGatherDispatcher:
    """Every rank gets all tokens, padded to the capacity, and computes what its experts must.

        tokens   -> row and physical experts as bytes: one all-gather
        results  <- [N, K, D], in which one rank at most has filled a slot: one reduce-scatter

    Two messages whose sizes everyone knows beforehand. The home rank weighs and adds, as
    `LocalDispatcher` does: equal to it bit for bit.
    """

    def __init__(self, group: RankGroup, turns: ReplicaTurns) -> None:
        self.group = group
        self.turns = turns
        self.experts = turns.experts

    def dispatch(self, x_TD: Tensor, routing: Routing, capacity: int) -> AllGathered:
        (num_tokens, width), top_k = x_TD.shape, routing.ids_TK.shape[1]
        missing = capacity - num_tokens
        assert missing >= 0, f"{num_tokens} tokens do not fit a capacity of {capacity}"
        physical_TK = self.turns.choose(routing.ids_TK).to(torch.int16)
        physical_CK = F.pad(physical_TK, (0, 0, 0, missing), value=-1)
        packed = self.group.all_gather(pack(F.pad(x_TD, (0, 0, 0, missing)), physical_CK))
        x_ND, physical_NK = unpack(packed, (width, x_TD.dtype), (top_k, torch.int16))

        # Neither others' experts nor padding, which is -1, stand in this rank's range.
        index_NK = physical_NK - self.group.rank * self.experts.most_local
        is_own_NK = (index_NK >= 0) & (index_NK < self.experts.most_local)
        num_local = self.experts.num_local[self.group.rank]
        permutation = permute(index_NK.where(is_own_NK, -1), num_local)
        # sync: most rows have their expert elsewhere, and are cut off.
        order_R = permutation.order_R[: int(permutation.counts_E.sum())]
        return AllGathered(
            rows_RD=take_rows(x_ND, order_R, top_k),
            counts_E=permutation.counts_E,
            order_R=order_R,
            num_slots=permutation.order_R.numel(),
            weights_TK=routing.weights_TK,
        )

    def combine(self, rows_RD: Tensor, dispatched: AllGathered) -> Tensor:
        (num_tokens, top_k), width = dispatched.weights_TK.shape, rows_RD.shape[1]
        slots = rows_RD.new_zeros((dispatched.num_slots, width))
        slots.index_copy_(0, dispatched.order_R, rows_RD)
        home = self.group.sum_disjoint(slots.view(dispatched.num_slots // top_k, top_k * width))
        slots_TKD = home[:num_tokens].view(num_tokens, top_k, width)
        return weigh_slots(slots_TKD, dispatched.weights_TK).to(rows_RD.dtype)
