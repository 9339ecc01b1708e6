"""One row: naive, published and ours on the same loads, in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from balance_bench.loads import Loads, LoadSet
from balance_bench.published import Slots, balance_published
from moe_serve.experts.analysis.load_statistics import balancedness, count_slots, rank_loads
from moe_serve.experts.balance import BalanceGoal, balance
from moe_serve.experts.placement import Placement, slots_of_ranks

# Shapes: L MoE layers, E logical experts, R ranks, P slots of all ranks, rank by rank.

Floats = npt.NDArray[np.float64]

# Two sums of the same loads in another order may differ by so much, relatively.
ROUNDING = 1e-12


class Case(NamedTuple):
    load_set: LoadSet
    num_ranks: int
    num_redundant: int
    num_groups: int = 1
    num_nodes: int = 1

    @property
    def num_experts(self) -> int:
        return int(self.load_set.loads[0].shape[1])

    @property
    def num_slots(self) -> int:
        return self.num_experts + self.num_redundant

    @property
    def is_feasible(self) -> bool:
        """The published algorithm wants as many slots on each rank; ours, no more than experts."""
        whole = self.num_slots % self.num_ranks == 0
        return whole and self.num_slots // self.num_ranks <= self.num_experts // self.num_nodes

    @property
    def goal(self) -> BalanceGoal:
        return BalanceGoal(num_nodes=self.num_nodes, num_groups=self.num_groups)


class Result(NamedTuple):
    """By layer of all loads; seconds of one load, by round, summed over loads."""

    linear: Floats
    published: Floats
    ours: Floats
    possible: Floats
    num_repeats: int
    published_seconds: list[float]
    our_seconds: list[float]

    @property
    def num_lower(self) -> int:
        return int((self.ours < self.published * (1 - ROUNDING)).sum())

    @property
    def ratio(self) -> float:
        return statistics.median(self.published_seconds) / statistics.median(self.our_seconds)


def compare(case: Case, rounds: int) -> Result:
    loads = case.load_set.loads
    sizes = slots_of_ranks(case.num_slots, case.num_ranks)
    theirs, ours = [], []
    seconds: tuple[list[float], list[float]] = ([0.0] * rounds, [0.0] * rounds)
    for load_LE, turn in itertools.product(loads, range(rounds)):
        slots_LP, taken = timed(lambda load_LE=load_LE: published_of(case, load_LE))
        seconds[0][turn] += taken
        placement, taken = timed(lambda load_LE=load_LE: balance(load_LE, sizes, goal=case.goal))
        seconds[1][turn] += taken
        if turn == 0:
            theirs.append(slots_LP)
            ours.append(placement)
    linear = Placement.make(
        len(loads[0]), case.num_experts, case.num_ranks, "linear", case.num_redundant
    )
    pairs = list(zip(loads, theirs, strict=True))
    return Result(
        linear=np.concatenate([balancedness(rank_loads(load_LE, linear)) for load_LE in loads]),
        published=np.concatenate(
            [even_with_repeats(load_LE, slots_LP, case.num_ranks) for load_LE, slots_LP in pairs]
        ),
        ours=np.concatenate(
            [balancedness(rank_loads(load, to)) for load, to in zip(loads, ours, strict=True)]
        ),
        possible=np.concatenate([most_even(case, load_LE) for load_LE in loads]),
        num_repeats=sum(count_repeats(slots_LP, case.num_ranks) for slots_LP in theirs),
        published_seconds=seconds[0],
        our_seconds=seconds[1],
    )


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def published_of(case: Case, load_LE: Loads) -> Slots:
    return balance_published(
        load_LE, case.num_slots, case.num_ranks, case.num_groups, case.num_nodes
    )


def even_with_repeats(load_LE: Loads, slots_LP: Slots, num_ranks: int) -> Floats:
    """[L]; a rank may hold an expert twice, which a `Placement` refuses."""
    counts_LE = count_slots(slots_LP, load_LE.shape[1])
    share_LP = np.take_along_axis(load_LE / counts_LE, slots_LP, axis=1)
    return balancedness(share_LP.reshape(len(load_LE), num_ranks, -1).sum(axis=2))


def count_repeats(slots_LP: Slots, num_ranks: int) -> int:
    sorted_LRS = np.sort(slots_LP.reshape(len(slots_LP), num_ranks, -1), axis=2)
    return int((sorted_LRS[..., 1:] == sorted_LRS[..., :-1]).sum())


def most_even(case: Case, load_LE: Loads) -> Floats:
    """[L]: no placement is more even, for one replica weighs that much at the least.

    A bound, not always reached: a rank has other slots to fill as well, which is counted only where
    no expert has replicas.
    """
    mean_L = load_LE.sum(axis=1) / case.num_ranks
    counts_LE = np.ones(load_LE.shape)
    for _ in range(case.num_redundant):
        share_LE = np.where(counts_LE < case.num_ranks, load_LE / counts_LE, -1)
        counts_LE[np.arange(len(load_LE)), share_LE.argmax(axis=1)] += 1
    heaviest_L = (load_LE / counts_LE).max(axis=1)
    if case.num_redundant == 0:
        others = case.num_slots // case.num_ranks - 1
        heaviest_L = heaviest_L + np.sort(load_LE, axis=1)[:, :others].sum(axis=1)
    least_L = np.maximum(np.maximum(mean_L, heaviest_L), np.finfo(np.float64).tiny)
    return np.where(mean_L > 0, mean_L / least_L, 1.0)
