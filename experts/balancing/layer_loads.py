"""Where the replicas of each layer lie while they are moved, and what follows from it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.experts.analysis.load_statistics import count_slots

# Shapes: L MoE layers, A some of them, E logical experts, R ranks, P slots rank by rank, S slots of
# the rank that has most.

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Loads are whole numbers of at most this many bits a layer in all, so that sums are exact and every
# machine finds the same.
LOAD_BITS = 58


@dataclasses.dataclass(slots=True, kw_only=True)
class LayerLoads:
    """State that changes: `swap` and `replace` move replicas, in many layers at once.

    `load_LE` are whole numbers (see `whole_loads`). Each rank has a slot at least. No expert may go
    where it is barred: where it is, and where `closed_LER` says so.
    """

    load_LE: Ints
    slots_LP: Ints
    num_slots: tuple[int, ...]
    closed_LER: Bools | None = None
    counts_LE: Ints = dataclasses.field(init=False)
    share_LE: Ints = dataclasses.field(init=False)
    held_LER: Bools = dataclasses.field(init=False)
    barred_LER: Bools = dataclasses.field(init=False)
    loads_LR: Ints = dataclasses.field(init=False)
    rank_P: Ints = dataclasses.field(init=False)
    slots_RS: Ints = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        assert min(self.num_slots) > 0
        sizes_R = np.array(self.num_slots)
        starts_R = np.cumsum(sizes_R) - sizes_R
        self.rank_P = np.repeat(np.arange(len(sizes_R)), sizes_R)
        # A rank with fewer slots names its last one again: the same change twice does no harm.
        self.slots_RS = starts_R[:, None] + np.minimum(
            np.arange(sizes_R.max()), sizes_R[:, None] - 1
        )
        self.counts_LE = count_slots(self.slots_LP, self.load_LE.shape[1])
        self.share_LE = self.load_LE // self.counts_LE
        self.held_LER = held_by(self.slots_LP, self.num_slots, self.load_LE.shape[1])
        self.barred_LER = self.held_LER
        if self.closed_LER is not None:
            self.barred_LER = self.held_LER | self.closed_LER
        self.loads_LR = np.empty((len(self.load_LE), len(sizes_R)), dtype=np.int64)
        self._add_up(np.arange(len(self.load_LE)))

    @property
    def most_L(self) -> Ints:
        most_L: Ints = self.loads_LR.max(axis=1)
        return most_L

    def every_rank(self, num_rows: int) -> Ints:
        """[num_rows, R]"""
        num_ranks = len(self.num_slots)
        return np.broadcast_to(np.arange(num_ranks), (num_rows, num_ranks))

    def swap(self, layers: Ints, slot_A: Ints, other_A: Ints) -> None:
        """Exchange what lies in two slots. A layer may come again, with other ranks."""
        rank_A, other_rank_A = self.rank_P[slot_A], self.rank_P[other_A]
        expert_A, other_expert_A = self.slots_LP[layers, slot_A], self.slots_LP[layers, other_A]
        rise_A = self.share_LE[layers, other_expert_A] - self.share_LE[layers, expert_A]
        self.loads_LR[layers, rank_A] += rise_A
        self.loads_LR[layers, other_rank_A] -= rise_A
        for table_LER in (self.held_LER, self.barred_LER):
            table_LER[layers, expert_A, rank_A] = False
            table_LER[layers, other_expert_A, other_rank_A] = False
            table_LER[layers, expert_A, other_rank_A] = True
            table_LER[layers, other_expert_A, rank_A] = True
        self.slots_LP[layers, slot_A] = other_expert_A
        self.slots_LP[layers, other_A] = expert_A

    def replace(self, layers: Ints, slot_A: Ints, expert_A: Ints) -> None:
        """Give a slot to another expert. No layer comes twice."""
        old_A, rank_A = self.slots_LP[layers, slot_A], self.rank_P[slot_A]
        for table_LER in (self.held_LER, self.barred_LER):
            table_LER[layers, old_A, rank_A] = False
            table_LER[layers, expert_A, rank_A] = True
        self.slots_LP[layers, slot_A] = expert_A
        for changed_A, by in ((old_A, -1), (expert_A, 1)):
            count_A = self.counts_LE[layers, changed_A] + by
            self.counts_LE[layers, changed_A] = count_A
            self.share_LE[layers, changed_A] = self.load_LE[layers, changed_A] // count_A
        self._add_up(layers)

    def _add_up(self, layers: Ints) -> None:
        share_AP = np.take_along_axis(self.share_LE[layers], self.slots_LP[layers], axis=1)
        self.loads_LR[layers] = np.add.reduceat(share_AP, self.slots_RS[:, 0], axis=1)


def held_by(slots_LP: npt.NDArray[Any], num_slots: Sequence[int], num_experts: int) -> Bools:
    """[L, E, R]: whether a rank holds an expert."""
    held_LER = np.zeros((len(slots_LP), num_experts, len(num_slots)), dtype=np.bool_)
    rank_P = np.repeat(np.arange(len(num_slots)), num_slots)
    held_LER[np.arange(len(slots_LP))[:, None], slots_LP, rank_P] = True
    return held_LER


def whole_loads(load_LE: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[np.int64]]:
    """Loads as whole numbers, and by layer the power of two [L] that they were scaled by.

    A layer's numbers use as many bits as fit; scaling by a power of two is exact and rounds alike
    on every machine.
    """
    float_LE = load_LE.astype(np.float64)
    exponent_L = np.frexp(float_LE.max(axis=1))[1].astype(np.int64)
    shift_L = LOAD_BITS - load_LE.shape[1].bit_length() - exponent_L
    return np.rint(np.ldexp(float_LE, shift_L[:, None])).astype(np.int64), shift_L
