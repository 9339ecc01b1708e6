"""The dispatcher that chooses by size, step by step."""

from __future__ import annotations

from torch import Tensor

from moe_serve.routing.all_gather import AllGatherDispatcher, AllGathered
from moe_serve.routing.all_to_all import AllToAllDispatched, AllToAllDispatcher
from moe_serve.routing.router import Routing

# Where all-to-all becomes faster. Measured with gloo on one machine, 2 and 4 ranks, rows of 2 KiB
# (scripts/bench_dispatch.py, BENCHMARKS.md): between 1.2 and 2.4 MB, and 1.3 and 1.8 MB. Below, it
# loses by its third message, with which the ranks tell each other their counts.
STATIC_BYTES = 2**20


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


def prefers_static(capacity: int, num_ranks: int, top_k: int, row_bytes: int) -> bool:
    """By the bytes that a rank would send, from what every rank knows: all choose alike."""
    return capacity * (num_ranks - 1) * (1 + top_k) * row_bytes <= STATIC_BYTES
