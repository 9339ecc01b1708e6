"""The dispatcher that chooses by size, step by step."""

from __future__ import annotations

from torch import Tensor

from moe_serve.routing.all_gather import AllGatherDispatcher, AllGathered
from moe_serve.routing.all_to_all import AllToAllDispatched, AllToAllDispatcher
from moe_serve.routing.router import Routing
from moe_serve.routing.traffic import prefers_static


class AutoDispatcher:
    """Static shapes while all they send is little: fewer messages; else only what is needed."""

    def __init__(self, static: AllGatherDispatcher, sparse: AllToAllDispatcher) -> None:
        self.static = static
        self.sparse = sparse

    def dispatch(
        self, x_TD: Tensor, routing: Routing, capacity: int
    ) -> AllGathered | AllToAllDispatched:
        top_k = routing.ids_TK.shape[1]
        row_bytes = x_TD.shape[1] * x_TD.element_size()
        if prefers_static(capacity, self.static.group.size, top_k, row_bytes):
            return self.static.dispatch(x_TD, routing, capacity)
        return self.sparse.dispatch(x_TD, routing, capacity)

    def combine(self, rows_RD: Tensor, dispatched: AllGathered | AllToAllDispatched) -> Tensor:
        if isinstance(dispatched, AllGathered):
            return self.static.combine(rows_RD, dispatched)
        return self.sparse.combine(rows_RD, dispatched)
