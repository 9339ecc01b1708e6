"""Never less even than the greedy algorithm that DeepSeek published as EPLB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moe_serve.experts.analysis.load_statistics import balancedness, rank_loads
from moe_serve.experts.balance import BalanceGoal, balance

# Shapes: L layers, E experts, R ranks, P slots.

Loads = npt.NDArray[Any]
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "expert_load"


def published(load_E: list[float], num_slots: int, num_ranks: int) -> float:
    """Balancedness of one layer by the plain algorithm; a rank may get an expert twice."""
    counts = [1] * len(load_E)
    for _ in range(num_slots - len(load_E)):
        shares = [load / count for load, count in zip(load_E, counts, strict=True)]
        counts[shares.index(max(shares))] += 1
    items = [load / count for load, count in zip(load_E, counts, strict=True) for _ in range(count)]
    loads, room = [0.0] * num_ranks, [num_slots // num_ranks] * num_ranks
    for item in sorted(items, reverse=True):
        rank = min((rank for rank in range(num_ranks) if room[rank]), key=loads.__getitem__)
        loads[rank] += item
        room[rank] -= 1
    return sum(loads) / num_ranks / max(loads)


def assert_as_even(load_LE: Loads, num_slots: int, num_ranks: int) -> None:
    placement = balance(load_LE, (num_slots // num_ranks,) * num_ranks)
    ours_L = balancedness(rank_loads(load_LE, placement))
    for layer, load_E in enumerate(load_LE.tolist()):
        theirs = published(load_E, num_slots, num_ranks)
        assert ours_L[layer] >= theirs * (1 - 1e-12), (layer, num_slots, num_ranks)


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(("num_slots", "num_ranks"), [(32, 2), (40, 4), (40, 8), (64, 16)])
def test_zipf_loads(skew: float, num_slots: int, num_ranks: int) -> None:
    rng = np.random.default_rng(int(10 * skew) + num_ranks)
    popularity_E = np.arange(1, 33) ** -skew
    load_E = rng.poisson(popularity_E / popularity_E.sum() * 32_000)
    assert_as_even(np.stack([rng.permutation(load_E) for _ in range(2)]), num_slots, num_ranks)


@pytest.mark.skipif(not DATA.exists(), reason="recorded loads are not here")
@pytest.mark.parametrize(("num_redundant", "num_ranks"), [(8, 8), (16, 4)])
def test_recorded_loads(num_redundant: int, num_ranks: int) -> None:
    for file in sorted(DATA.glob("*_counts.json")):
        for counts in json.loads(file.read_text())["counts"].values():
            load_LE = np.array(counts)[:3]
            assert_as_even(load_LE, load_LE.shape[1] + num_redundant, num_ranks)


def test_the_published_example_of_groups_on_nodes_is_not_less_even() -> None:
    """The example of the README of github.com/deepseek-ai/EPLB, and what it prints for it."""
    load_LE = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    theirs_LP = np.array(
        [
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ]
    )
    counts_LE = np.stack([np.bincount(row, minlength=12) for row in theirs_LP])
    share_LP = np.take_along_axis(load_LE / counts_LE, theirs_LP, axis=1)
    theirs_L = balancedness(share_LP.reshape(2, 8, 2).sum(axis=2))
    placement = balance(load_LE, (2,) * 8, goal=BalanceGoal(num_nodes=2, num_groups=4))
    assert (balancedness(rank_loads(load_LE, placement)) >= theirs_L).all()
