"""What every dispatcher does: bring tokens to their experts, and the results back."""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeVar

from torch import Tensor

from moe_serve.routing.router import Routing

# Shapes: T tokens of this rank, D model, K top-k, E experts of this rank, R rows computed here,
# sorted by expert.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """`counts_E[i]` rows for expert i of this rank's bank, in order, on the device.

    Rows past their sum belong to nobody: they fill up a shape that the host knows. A
    dispatcher adds what its `combine` needs.
    """

    rows_RD: Tensor
    counts_E: Tensor


D = TypeVar("D", bound=Dispatched)


class Dispatcher(Protocol[D]):
    """Every rank of the group calls both, in the same order, also with T = 0."""

    def dispatch(self, x_TD: Tensor, routing: Routing, capacity: int) -> D:
        """`capacity`: the largest T of any rank in this step, the same number on every rank."""
        ...

    def combine(self, rows_RD: Tensor, dispatched: D) -> Tensor:
        """Results of the dispatched rows -> each own token's weighted sum, [T, D]."""
        ...
