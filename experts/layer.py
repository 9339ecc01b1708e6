"""Routed experts of one layer: how a rank's tokens meet them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.placement import LayerPlacement
from moe_serve.experts.tensor_parallel import TensorParallelExperts
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.layout import RankLayout
from moe_serve.routing.backends import Backend, make_dispatcher
from moe_serve.routing.dispatch import Dispatcher
from moe_serve.routing.expert_map import ExpertMap
from moe_serve.routing.local import LocalDispatcher
from moe_serve.routing.router import Routing

# Shapes: T own tokens, D model.


class ExpertPath(Protocol):
    """Every rank of the group calls `run`, also with T = 0."""

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        bank: ExpertBank,
        capacity: int,
        rows_1: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of each own token's experts -> [T, D] in x's dtype.

        `capacity`: the largest T of any rank of the group in this step, the same on each.
        `rows_1` grows by the rows that whole experts of this rank compute.
        """
        ...


class DispatchedExperts:
    """Whole experts, here or on other ranks: tokens go to them and their results come back."""

    def __init__(self, dispatcher: Dispatcher[Any]) -> None:
        self.dispatcher = dispatcher

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        bank: ExpertBank,
        capacity: int,
        rows_1: Tensor | None = None,
    ) -> Tensor:
        here = self.dispatcher
        if isinstance(here, LocalDispatcher) and bank.is_packed and rows_1 is None:
            return bank.run_all(x_TD, routing.ids_TK, routing.weights_TK, here.index_of_E)
        dispatched = self.dispatcher.dispatch(x_TD, routing, capacity)
        if rows_1 is not None:
            rows_1 += dispatched.counts_E.sum()
        return self.dispatcher.combine(bank(dispatched.rows_RD, dispatched.counts_E), dispatched)


def make_expert_path(
    layout: RankLayout,
    group: RankGroup,
    placement: LayerPlacement,
    backend: Backend,
    device: torch.device,
) -> ExpertPath:
    """`group`: the ranks that `placement` spreads whole experts over, or the lane that splits each.

    The former with expert parallelism, the latter without.
    """
    if not layout.expert_parallel and group.size > 1:
        return TensorParallelExperts(group, deterministic=layout.deterministic)
    experts = ExpertMap.make(placement.experts, group.rank, device)
    return DispatchedExperts(make_dispatcher(backend, group, experts))
