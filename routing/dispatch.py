"""What every dispatcher does: bring tokens to their experts, and the results back."""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeVar

from torch import Tensor

from moe_serve.routing.router import Routing

# Shapes: T tokens of this rank, D model, K top-k, R rows computed here, sorted by local expert.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """`counts[i]` rows for expert i of this rank's bank, in order; host integers that sum to R.

    A dispatcher adds what its `combine` needs.
    """

    rows_RD: Tensor
    counts: list[int]


D = TypeVar("D", bound=Dispatched)


class Dispatcher(Protocol[D]):
    """Every rank of the group calls both, in the same order, also with T = 0."""

    def dispatch(self, x_TD: Tensor, routing: Routing, capacity: int) -> D:
        """`capacity`: the largest T of any rank in this step, the same number on every rank."""
        ...

    def combine(self, rows_RD: Tensor, dispatched: D) -> Tensor:
        """Results of the dispatched rows -> each own token's weighted sum, [T, D]."""
        ...


def weigh_slots(slots_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum over each token's slots -> [T, D] in fp32.

    Slots are added one after the other, by (token, slot): the result cannot depend on which
    expert, rank or replica a row came from.
    """
    out_TD: Tensor = slots_TKD[:, 0].float() * weights_TK[:, :1]
    for slot in range(1, weights_TK.shape[1]):
        out_TD = out_TD + slots_TKD[:, slot].float() * weights_TK[:, slot : slot + 1]
    return out_TD


def weigh_rows(rows_RD: Tensor, inverse_R: Tensor, weights_TK: Tensor) -> Tensor:
    """The same, where slot k of token t is row `inverse_R[t * K + k]` -> [T, D], rows' dtype."""
    num_tokens, top_k = weights_TK.shape
    slots_TKD = rows_RD.index_select(0, inverse_R).view(num_tokens, top_k, rows_RD.shape[1])
    return weigh_slots(slots_TKD, weights_TK).to(rows_RD.dtype)
