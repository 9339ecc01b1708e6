"""Which rank holds which experts. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import PlacementError
from moe_serve.parallel.shard import split

# Shapes: L MoE layers, E logical experts, P slots of all ranks (physical experts), rank by rank.

Slots = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPlacement:
    """`experts[rank]`: the logical experts in that rank's slots, in the order of its bank.

    Each logical expert is on one rank at least, on none twice; a rank may have none. Raises
    `PlacementError` otherwise.
    """

    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for rank, own in enumerate(self.experts):
            if len(set(own)) < len(own):
                twice = next(expert for expert in own if own.count(expert) > 1)
                raise PlacementError(f"rank {rank} holds expert {twice} twice")
        placed = {expert for own in self.experts for expert in own}
        missing = set(range(max(placed, default=-1) + 1)) - placed
        if missing or min(placed, default=0) < 0:
            raise PlacementError(f"expert {min(missing or placed)} has no rank")

    @property
    def num_experts(self) -> int:
        return 1 + max((expert for own in self.experts for expert in own), default=-1)

    @property
    def num_replicas(self) -> list[int]:
        """By logical expert: the ranks that hold it."""
        counts = [0] * self.num_experts
        for own in self.experts:
            for expert in own:
                counts[expert] += 1
        return counts


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """One `LayerPlacement` a MoE layer; a rank has as many slots in each."""

    layers: tuple[LayerPlacement, ...]

    def __post_init__(self) -> None:
        shapes = {tuple(map(len, layer.experts)) for layer in self.layers}
        if len(shapes) > 1:
            raise PlacementError(f"layers differ in the slots of their ranks: {sorted(shapes)}")

    @classmethod
    def make(
        cls,
        num_layers: int,
        num_experts: int,
        num_ranks: int,
        strategy: str = "linear",
        num_redundant: int = 0,
    ) -> Placement:
        """The same in each layer, in numbers that differ by one at most.

        linear: runs of neighbours; round_robin: expert e on rank e % ranks. Redundant slots hold
        copies of the experts that follow a rank's last one.
        Example, 8 experts on 3 ranks, linear: 0 1 2 | 3 4 5 | 6 7; with 4 redundant:
        0 1 2 3 | 3 4 5 6 | 6 7 0 1.
        """
        ranks = [
            tuple(range(rank, num_experts, num_ranks))
            if strategy == "round_robin"
            else tuple(range(*split(num_experts, rank, num_ranks)))
            for rank in range(num_ranks)
        ]
        num_slots = slots_of_ranks(num_experts + num_redundant, num_ranks)
        layer = LayerPlacement(
            tuple(
                own + _followers(own, count - len(own), num_experts)
                for own, count in zip(ranks, num_slots, strict=True)
            )
        )
        return cls((layer,) * num_layers)

    @classmethod
    def of_slots(cls, slots_LP: npt.NDArray[Any], num_slots: Sequence[int]) -> Placement:
        """`slots_LP`: logical experts; `num_slots`: of each rank, which sum to P.

        Raises `PlacementError`, naming the layer.
        """
        assert slots_LP.shape[1] == sum(num_slots)
        ends = np.cumsum(num_slots).tolist()
        starts = [end - count for end, count in zip(ends, num_slots, strict=True)]
        layers = []
        for index, row in enumerate(slots_LP.tolist()):
            try:
                ranks = (tuple(row[i:j]) for i, j in zip(starts, ends, strict=True))
                layers.append(LayerPlacement(tuple(ranks)))
            except PlacementError as error:
                raise PlacementError(f"layer {index}: {error}") from None
        return cls(tuple(layers))

    @property
    def slots_LP(self) -> Slots:
        """The logical expert in each slot, rank after rank."""
        rows = [[e for own in layer.experts for e in own] for layer in self.layers]
        return np.array(rows, dtype=np.int32).reshape(self.num_layers, self.num_slots)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        return max((layer.num_experts for layer in self.layers), default=0)

    @property
    def num_ranks(self) -> int:
        return len(self.layers[0].experts) if self.layers else 0

    @property
    def slots_of_ranks(self) -> tuple[int, ...]:
        return tuple(map(len, self.layers[0].experts)) if self.layers else ()

    @property
    def num_slots(self) -> int:
        """Of all ranks, in each layer."""
        return sum(self.slots_of_ranks)


def slots_of_ranks(num_slots: int, num_ranks: int) -> tuple[int, ...]:
    """Slots of each rank; they differ by one at most."""
    return tuple(split(num_slots, rank, num_ranks).size for rank in range(num_ranks))


def check_redundant(num_experts: int, num_redundant: int, num_ranks: int) -> None:
    """Raises `PlacementError` where some rank would have to hold an expert twice."""
    most = num_experts * (num_ranks - 1)
    if num_redundant > most:
        raise PlacementError(
            f"{num_redundant} redundant experts: {num_experts} experts on {num_ranks} ranks leave "
            f"room for {most}, where each rank holds every expert"
        )


def _followers(own: tuple[int, ...], count: int, num_experts: int) -> tuple[int, ...]:
    """The next `count` experts behind a rank's last one that it does not hold."""
    first = own[-1] + 1 if own else 0
    others = ((first + step) % num_experts for step in range(num_experts))
    return tuple(expert for expert in others if expert not in own)[:count]
