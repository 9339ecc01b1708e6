"""Case B06 and what a placement must keep to, whatever the loads."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.errors import PlacementError
from moe_serve.experts.analysis.load_statistics import balancedness, rank_loads
from moe_serve.experts.balance import BalanceGoal, balance
from moe_serve.experts.placement import Placement, slots_of_ranks

# Shapes: L layers, E experts, R ranks, P slots.

Loads = npt.NDArray[Any]

HOT = [1000, 1, 1, 1, 1, 1, 1, 1]
RANDOM = [
    np.random.default_rng(seed).integers(0, 1 << (1 + seed % 41), 8).tolist() for seed in range(50)
]


def most(load_LE: Loads, placement: Placement) -> npt.NDArray[np.float64]:
    return rank_loads(load_LE, placement).max(axis=1, initial=0)


def linear(num_layers: int, num_experts: int, num_slots: Sequence[int]) -> Placement:
    num_redundant = sum(num_slots) - num_experts
    return Placement.make(num_layers, num_experts, len(num_slots), "linear", num_redundant)


def changed(before: Placement, after: Placement) -> int:
    """Slots whose rank did not hold their expert."""
    return sum(
        len(set(new) - set(old))
        for old_layer, new_layer in zip(before.layers, after.layers, strict=True)
        for old, new in zip(old_layer.experts, new_layer.experts, strict=True)
    )


def assert_not_worse(load_LE: Loads, after: Placement, before: Placement) -> None:
    assert (most(load_LE, after) <= most(load_LE, before) * (1 + 1e-12)).all()


@pytest.mark.parametrize(
    "load_E",
    [HOT, [0] * 8, [5] * 8, [0, 0, 0, 7, 0, 0, 0, 0], [(1 << 40) - n for n in range(8)], *RANDOM],
)
def test_b06_every_expert_is_placed_once_a_rank_and_no_rank_is_fuller_than_in_order(
    load_E: list[int],
) -> None:
    load_LE = np.array([load_E, load_E[::-1]])
    placement = balance(load_LE, (3,) * 4)  # a placement refuses an expert without a slot
    assert placement.slots_of_ranks == (3,) * 4
    assert placement.num_experts == 8
    assert_not_worse(load_LE, placement, linear(2, 8, (3,) * 4))


def test_b06_the_hottest_expert_gets_a_replica_on_each_rank() -> None:
    placement = balance(np.array([HOT]), (3,) * 4)
    assert placement.layers[0].num_replicas[0] == 4
    assert balancedness(rank_loads(np.array([HOT]), placement))[0] > 0.99


def test_loads_that_fit_exactly_are_even() -> None:
    load_LE = np.array([[7, 6, 5, 4, 3, 2, 2, 1]])
    assert balancedness(rank_loads(load_LE, balance(load_LE, (2,) * 4))).tolist() == [0.9375]
    assert balancedness(rank_loads(load_LE, balance(load_LE, (4,) * 2))).tolist() == [1.0]


def test_without_load_or_gain_experts_lie_in_order() -> None:
    for load in (0, 3):
        assert balance(np.full((2, 9), load), (3, 3, 3)) == linear(2, 9, (3, 3, 3))


@pytest.mark.parametrize("shape", [(0, 4), (1, 4)])
def test_no_layers_and_one_rank(shape: tuple[int, int]) -> None:
    placement = balance(np.ones(shape), (4,))
    assert placement.num_layers == shape[0]
    assert balance(np.ones(shape), (4,), current=placement) == placement


def test_the_same_bytes_in_another_process() -> None:
    code = (
        "import hashlib, numpy as np\n"
        "from moe_serve.experts.balance import BalanceGoal, balance\n"
        "load = (np.arange(1, 193).reshape(3, 64) * 7919 % 1009) ** 2\n"
        "first = balance(load, (10,) * 8)\n"
        "later = balance(load[::-1], (10,) * 8, current=first, goal=BalanceGoal(max_moves=40))\n"
        "print(hashlib.sha256(first.slots_LP.tobytes() + later.slots_LP.tobytes()).hexdigest())\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    load_LE = (np.arange(1, 193).reshape(3, 64) * 7919 % 1009) ** 2
    first = balance(load_LE, (10,) * 8)
    goal = BalanceGoal(max_moves=40)
    later = balance(load_LE[::-1], (10,) * 8, current=first, goal=goal)
    slots = first.slots_LP.tobytes() + later.slots_LP.tobytes()
    assert hashlib.sha256(slots).hexdigest() == there


def test_loads_in_other_units_and_types_give_the_same_placement() -> None:
    load_LE = np.random.default_rng(3).integers(0, 1000, (2, 17))
    wanted = balance(load_LE, slots_of_ranks(23, 4))
    for same_LE in (load_LE * 2.0**-30, load_LE << 30, load_LE.astype(np.float32)):
        assert balance(same_LE, slots_of_ranks(23, 4)) == wanted


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Loads, tuple[int, ...]]:
    num_experts = draw(st.integers(1, 17))
    num_ranks = draw(st.integers(1, 7))
    num_slots = draw(st.integers(num_experts, min(num_experts * num_ranks, num_experts + 12)))
    seed = draw(st.integers(0, 1 << 20))
    skew = draw(st.sampled_from([0.0, 1.0, 3.0]))
    rng = np.random.default_rng(seed)
    shape = (draw(st.integers(1, 3)), num_experts)
    load_LE = np.floor(rng.random(shape) * 2.0**40 * rng.random(shape) ** (4 * skew))
    return load_LE.astype(np.int64), slots_of_ranks(num_slots, num_ranks)


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_any_size_is_no_worse_than_in_order(task: tuple[Loads, tuple[int, ...]]) -> None:
    load_LE, num_slots = task
    placement = balance(load_LE, num_slots)
    assert placement.slots_of_ranks == num_slots
    assert placement.num_experts == load_LE.shape[1]
    assert_not_worse(load_LE, placement, linear(*load_LE.shape, num_slots))


@settings(max_examples=30, deadline=None)
@given(tasks(), st.integers(0, 30), st.booleans())
def test_a_budget_of_moves_is_kept_and_never_makes_it_worse(
    task: tuple[Loads, tuple[int, ...]], max_moves: int, is_linear: bool
) -> None:
    load_LE, num_slots = task
    others_LE = load_LE[:, ::-1]
    current = linear(*load_LE.shape, num_slots) if is_linear else balance(others_LE, num_slots)
    goal = BalanceGoal(max_moves=max_moves)
    placement = balance(load_LE, num_slots, current=current, goal=goal)
    assert changed(current, placement) <= max_moves
    assert_not_worse(load_LE, placement, current)
    assert_stays_in_its_slot(current, placement)
    free = balance(load_LE, num_slots, current=current)
    assert_not_worse(load_LE, free, current)
    assert_stays_in_its_slot(current, free)


def assert_stays_in_its_slot(before: Placement, after: Placement) -> None:
    for old_layer, new_layer in zip(before.layers, after.layers, strict=True):
        for old, new in zip(old_layer.experts, new_layer.experts, strict=True):
            assert all(new.index(expert) == old.index(expert) for expert in set(old) & set(new))


def test_more_moves_never_hurt_and_enough_reach_what_no_limit_does() -> None:
    load_LE = (np.random.default_rng(5).random((4, 33)) ** 6 * 1e6).astype(np.int64)
    num_slots = slots_of_ranks(41, 6)
    current = linear(4, 33, num_slots)
    sums = []
    for max_moves in (0, 1, 2, 5, 10, 41, 164):
        goal = BalanceGoal(max_moves=max_moves)
        placement = balance(load_LE, num_slots, current=current, goal=goal)
        sums.append(most(load_LE, placement).sum())
    assert sums[0] == most(load_LE, current).sum()
    assert sums[1] < sums[0]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(sums))
    free = balance(load_LE, num_slots, current=current)
    assert sums[-1] <= most(load_LE, free).sum() * (1 + 1e-3)


def test_moves_go_to_the_layer_that_gains_most() -> None:
    load_LE = np.array([[11, 9, 1, 1], [1100, 900, 1, 1], [1, 1, 1, 1]])
    current = linear(3, 4, (2, 2))
    goal = BalanceGoal(max_moves=2)
    placement = balance(load_LE, (2, 2), current=current, goal=goal)
    assert placement.layers[0] == current.layers[0]
    assert most(load_LE, placement).tolist() == [20, 1101, 2]


def test_what_is_even_already_stays() -> None:
    load_LE = np.array([[5, 5, 5, 5, 5, 5], [9, 1, 1, 1, 8, 2]])
    current = Placement.of_slots(np.array([[4, 2, 0, 1, 5, 3], [0, 3, 5, 4, 1, 2]]), (3, 3))
    assert balance(load_LE, (3, 3), current=current).layers[0] == current.layers[0]


def test_ranks_are_renamed_rather_than_emptied() -> None:
    load_LE = np.array([[8, 8, 8, 1, 1, 1, 1, 1]])
    current = Placement.of_slots(np.array([[5, 3, 0, 1, 7, 6, 4, 2]]), (2, 2, 2, 2))
    placement = balance(load_LE, (2, 2, 2, 2), current=current)
    assert most(load_LE, placement).tolist() == [9]
    assert changed(current, placement) == 2


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(0, 999)
)
def test_a_group_stays_on_one_node(
    groups_per_node: int, size: int, ranks_per_node: int, num_redundant: int, seed: int
) -> None:
    num_nodes = 1 + seed % 3
    num_groups = groups_per_node * num_nodes
    num_experts = num_groups * size
    num_ranks = num_nodes * ranks_per_node
    num_redundant = min(num_redundant, num_experts * (ranks_per_node - 1)) // num_ranks * num_ranks
    num_slots = slots_of_ranks(num_experts + num_redundant, num_ranks)
    if max(num_slots) > groups_per_node * size or sum(num_slots[-ranks_per_node:]) < (
        groups_per_node * size
    ):
        return
    load_LE = (np.random.default_rng(seed).random((2, num_experts)) ** 4 * 1e5).astype(np.int64)
    goal = BalanceGoal(num_nodes=num_nodes, num_groups=num_groups)
    first = balance(load_LE, num_slots, goal=goal)
    again = balance(load_LE[::-1], num_slots, current=first, goal=goal)
    few = BalanceGoal(num_nodes=num_nodes, num_groups=num_groups, max_moves=3)
    later = balance(load_LE[::-1], num_slots, current=first, goal=few)
    assert changed(first, later) <= 3
    for placement in (first, again, later):
        if goal.keeps_groups:
            assert_groups_on_nodes(placement, goal, size)
    for placement in (again, later):
        assert_not_worse(load_LE[::-1], placement, first)


def assert_groups_on_nodes(placement: Placement, goal: BalanceGoal, size: int) -> None:
    per_node = placement.num_ranks // goal.num_nodes
    for layer in placement.layers:
        nodes = [
            {expert // size for own in layer.experts[first : first + per_node] for expert in own}
            for first in range(0, placement.num_ranks, per_node)
        ]
        assert [len(groups) for groups in nodes] == [goal.num_groups // goal.num_nodes] * len(nodes)
        assert len(set().union(*nodes)) == goal.num_groups


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 17), st.integers(2, 6), st.integers(0, 9), st.integers(0, 999))
def test_two_replicas_of_each_expert(
    num_experts: int, num_ranks: int, num_more: int, seed: int
) -> None:
    num_slots = slots_of_ranks(min(2 * num_experts + num_more, num_experts * num_ranks), num_ranks)
    load_LE = (np.random.default_rng(seed).random((2, num_experts)) ** 4 * 1e5).astype(np.int64)
    goal = BalanceGoal(min_replicas=2)
    placement = balance(load_LE, num_slots, goal=goal)
    assert all(min(layer.num_replicas) >= 2 for layer in placement.layers)
    current = balance(load_LE, num_slots)
    again = balance(load_LE, num_slots, current=current, goal=goal)
    assert all(min(layer.num_replicas) >= 2 for layer in again.layers)
    missing = sum(max(2 - count, 0) for layer in current.layers for count in layer.num_replicas)
    if missing:
        few = BalanceGoal(min_replicas=2, max_moves=missing - 1)
        with pytest.raises(PlacementError, match=f"{missing - 1} moves at most"):
            balance(load_LE, num_slots, current=current, goal=few)


@pytest.mark.parametrize(
    ("num_slots", "goal", "message"),
    [
        ((3, 4), {}, "7 slots on 2 ranks for 8 experts"),
        ((9, 9), {}, "a rank with 9 slots would hold one of 8 experts twice"),
        ((2, 4, 4), {}, "ranks have 2 to 4 slots"),
        ((), {}, "8 experts in"),
        ((4, 4, 4), {"min_replicas": 2}, "12 slots for 8 experts x 2 replicas"),
        ((8, 8), {"min_replicas": 3}, "16 slots for 8 experts x 3 replicas"),
        ((5, 5, 5), {"num_nodes": 2}, "3 ranks on 2 nodes"),
        ((4, 4), {"num_groups": 3}, "8 experts in 3 groups"),
        ((5, 5), {"num_nodes": 2, "num_groups": 4}, "node 0: a rank with 5 slots"),
        ((3, 3, 2, 1), {}, "ranks have 1 to 3 slots"),
        ((4, 4), {"min_replicas": 0}, "min_replicas is 0"),
        ((4, 4), {"max_moves": -1}, "max_moves is -1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(
    num_slots: tuple[int, ...], goal: dict[str, int], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        balance(np.ones((1, 8)), num_slots, goal=BalanceGoal(**goal))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_a_load_that_is_none_is_refused(wrong: float) -> None:
    load_LE = np.ones((2, 4))
    load_LE[1, 2] = wrong
    with pytest.raises(PlacementError, match=f"load of layer 1, expert 2 is {wrong}"):
        balance(load_LE, (2, 2))


def test_a_current_placement_of_another_shape_is_refused() -> None:
    with pytest.raises(PlacementError, match="has 1 layers, 4 experts"):
        balance(np.ones((2, 4)), (2, 2), current=linear(1, 4, (2, 2)))
    with pytest.raises(PlacementError, match="wanted"):
        balance(np.ones((2, 4)), (2, 2), current=linear(2, 4, (3, 2)))
