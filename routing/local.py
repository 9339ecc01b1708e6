"""The dispatcher of a single rank, and the oracle for those that cross ranks."""

from __future__ import annotations

import dataclasses

from torch import Tensor
from torch.nn import functional as F

from moe_serve.kernels.combine import weigh_rows
from moe_serve.kernels.permute import permute
from moe_serve.kernels.take_rows import take_rows
from moe_serve.routing.dispatch import Dispatched
from moe_serve.routing.router import Routing

# Shapes: T tokens, D model, K top-k, E experts, R = T * K rows sorted by expert.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocallyDispatched(Dispatched):
    inverse_R: Tensor
    weights_TK: Tensor


class LocalDispatcher:
    """All experts live here, in order, or at `index_of_E` of the bank."""

    def __init__(self, num_experts: int, index_of_E: Tensor | None = None) -> None:
        self.num_experts = num_experts
        # Padding has the id -1, which finds the last entry.
        self.index_of_E = None if index_of_E is None else F.pad(index_of_E, (0, 1), value=-1)

    def dispatch(self, x_TD: Tensor, routing: Routing, capacity: int) -> LocallyDispatched:
        ids_TK = routing.ids_TK
        index_TK = ids_TK if self.index_of_E is None else self.index_of_E[ids_TK]
        permutation = permute(index_TK, self.num_experts)
        return LocallyDispatched(
            rows_RD=take_rows(x_TD, permutation.order_R, ids_TK.shape[1]),
            counts_E=permutation.counts_E,
            inverse_R=permutation.inverse_R,
            weights_TK=routing.weights_TK,
        )

    def combine(self, rows_RD: Tensor, dispatched: LocallyDispatched) -> Tensor:
        return weigh_rows(rows_RD, dispatched.inverse_R, dispatched.weights_TK)
