"""Routed experts of one layer: dispatch, compute, combine."""

from __future__ import annotations

from torch import Tensor

from moe_serve.experts.bank import ExpertBank
from moe_serve.routing.dispatch import LocalDispatcher
from moe_serve.routing.router import Routing


def moe_experts(x_TD: Tensor, routing: Routing, bank: ExpertBank) -> Tensor:
    """Weighted sum of each token's experts -> [T, D] in x's dtype. T = 0 gives an empty result."""
    dispatcher = LocalDispatcher(bank.num_experts)
    dispatched = dispatcher.dispatch(x_TD, routing)
    return dispatcher.combine(bank(dispatched.rows_RD, dispatched.counts), dispatched)
