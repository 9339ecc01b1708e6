"""What is lost with a rank, and what it costs to lose nothing. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy.typing as npt

from moe_serve.experts.balance import BalanceGoal, balance
from moe_serve.experts.placement import Placement, slots_of_ranks
from moe_serve.experts.rank_load import balancedness, rank_loads

# Shapes: L MoE layers, E logical experts.

GB = 1e9


class Loss(NamedTuple):
    """The experts of a layer that no other rank holds."""

    layer: int
    rank: int
    experts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CoveragePrice:
    """A placement that may lose any one rank, beside one that may not.

    Slots are those of all ranks in one layer; bytes are of expert weights, over all layers. The
    rank's are of the one that gets most. Balancedness is over layers.
    """

    num_slots: int
    num_covered_slots: int
    extra_bytes: int
    extra_bytes_of_rank: int
    balancedness_mean: float
    balancedness_min: float
    covered_balancedness_mean: float
    covered_balancedness_min: float

    @property
    def num_extra_slots(self) -> int:
        return self.num_covered_slots - self.num_slots

    @property
    def extra_gb(self) -> float:
        return self.extra_bytes / GB

    @property
    def extra_gb_of_rank(self) -> float:
        return self.extra_bytes_of_rank / GB


def lost_with(placement: Placement) -> list[Loss]:
    """By layer and rank, where any expert would be lost; empty: any one rank may go.

    Example, ranks (0 1) (1 2): rank 0 takes 0 with it, rank 1 takes 2.
    """
    losses = []
    for index, layer in enumerate(placement.layers):
        counts = layer.num_replicas
        for rank, own in enumerate(layer.experts):
            only = tuple(sorted(expert for expert in own if counts[expert] == 1))
            if only:
                losses.append(Loss(index, rank, only))
    return losses


def coverage_price(
    load_LE: npt.NDArray[Any], num_ranks: int, num_redundant: int, expert_bytes: int
) -> CoveragePrice:
    """What two replicas of each expert cost, where `num_redundant` slots are to spare anyway.

    `expert_bytes`: weights of one expert of one layer. Raises `PlacementError` for one rank, which
    nothing can cover, and for loads and slots that cannot be balanced.
    """
    num_layers, num_experts = load_LE.shape
    num_slots = num_experts + num_redundant
    num_covered = max(num_slots, 2 * num_experts)
    sizes, covered = slots_of_ranks(num_slots, num_ranks), slots_of_ranks(num_covered, num_ranks)
    even_L = balancedness(rank_loads(load_LE, balance(load_LE, sizes)))
    goal = BalanceGoal(min_replicas=2)
    covered_L = balancedness(rank_loads(load_LE, balance(load_LE, covered, goal=goal)))
    extra = max(after - before for after, before in zip(covered, sizes, strict=True))
    return CoveragePrice(
        num_slots=num_slots,
        num_covered_slots=num_covered,
        extra_bytes=(num_covered - num_slots) * num_layers * expert_bytes,
        extra_bytes_of_rank=extra * num_layers * expert_bytes,
        balancedness_mean=float(even_L.mean()),
        balancedness_min=float(even_L.min()),
        covered_balancedness_mean=float(covered_L.mean()),
        covered_balancedness_min=float(covered_L.min()),
    )
