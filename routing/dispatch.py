"""Bring tokens to their experts and the results back: the dispatcher of one rank.

This one is the path for a single rank and the oracle for those that cross ranks.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from moe_serve.kernels.permute import Permutation, permute
from moe_serve.routing.router import Routing

# Shapes: T tokens, D model, K top-k, E experts, R = T * K rows sorted by expert.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows sorted by expert, and what `combine` needs to undo it."""

    rows_RD: Tensor
    counts: list[int]
    permutation: Permutation
    weights_TK: Tensor


class LocalDispatcher:
    """All experts live here."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        permutation = permute(routing.ids_TK, self.num_experts)
        top_k = routing.ids_TK.shape[1]
        rows_RD = x_TD.index_select(0, permutation.order_R // top_k)
        # sync: the expert loop needs its row counts on the host.
        counts = permutation.counts_E.tolist()
        return Dispatched(
            rows_RD=rows_RD, counts=counts, permutation=permutation, weights_TK=routing.weights_TK
        )

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Weighted sum over each token's slots -> [T, D] in the rows' dtype.

        Slots are added one after the other in fp32, by (token, slot): the result cannot depend on
        which expert, rank or replica a row came from.
        """
        weights_TK = dispatched.weights_TK
        num_tokens, top_k = weights_TK.shape
        slots_TKD = rows_RD.index_select(0, dispatched.permutation.inverse_R).float()
        slots_TKD = slots_TKD.view(num_tokens, top_k, rows_RD.shape[1])
        out_TD: Tensor = slots_TKD[:, 0] * weights_TK[:, :1]
        for slot in range(1, top_k):
            out_TD = out_TD + slots_TKD[:, slot] * weights_TK[:, slot : slot + 1]
        return out_TD.to(rows_RD.dtype)
