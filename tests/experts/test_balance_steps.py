"""Each step of the balancer against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from moe_serve.experts.analysis.load_statistics import rank_loads
from moe_serve.experts.balance import balance
from moe_serve.experts.balancing.layer_loads import LayerLoads
from moe_serve.experts.balancing.local_search import best_replacement, best_swap, improve
from moe_serve.experts.balancing.move_budget import Option, choose
from moe_serve.experts.balancing.packing import pack
from moe_serve.experts.balancing.replication import replicate

# Shapes: L layers, E experts, R ranks, P slots rank by rank.

Ints = npt.NDArray[np.int64]

CASES = [(7, (3, 3, 2)), (8, (3, 3, 3, 3)), (5, (4, 4)), (9, (2, 2, 2, 2, 2))]


def state_of(seed: int, num_experts: int, num_slots: tuple[int, ...]) -> LayerLoads:
    """One layer of any placement without repeats, not a good one."""
    rng = np.random.default_rng(seed)
    load_LE = (rng.random((1, num_experts)) ** 3 * 1e6).astype(np.int64)
    other_LE = rng.integers(1, 100, (1, num_experts))
    counts_LE = replicate(other_LE, sum(num_slots), most=len(num_slots))
    slots_LP = pack(other_LE, counts_LE, num_slots)
    return LayerLoads(load_LE=load_LE, slots_LP=slots_LP, num_slots=num_slots)


def loads_of(slots: list[int], state: LayerLoads) -> list[int] | None:
    """Loads of the ranks, or None where an expert is missing or on a rank twice."""
    if set(slots) != set(range(state.load_LE.shape[1])):
        return None
    loads = []
    ends = np.cumsum(state.num_slots).tolist()
    for end, count in zip(ends, state.num_slots, strict=True):
        own = slots[end - count : end]
        if len(set(own)) < len(own):
            return None
        loads.append(sum(int(state.load_LE[0, e]) // slots.count(e) for e in own))
    return loads


def after(slots: list[int], state: LayerLoads) -> int | None:
    """Load of the rank that was fullest, or of the fullest that rose."""
    now = state.loads_LR[0].tolist()
    loads = loads_of(slots, state)
    if loads is None:
        return None
    top = now.index(max(now))
    return max(new for rank, new in enumerate(loads) if rank == top or new > now[rank])


@pytest.mark.parametrize(("num_experts", "num_slots"), CASES)
def test_the_best_swap_is_the_best_of_all(num_experts: int, num_slots: tuple[int, ...]) -> None:
    for seed in range(12):
        state = state_of(seed, num_experts, num_slots)
        top_A = state.loads_LR.argmax(axis=1)
        swap = best_swap(state, np.array([0]), top_A, state.every_rank(1))
        results = []
        for slot, other in itertools.product(range(sum(num_slots)), repeat=2):
            slots = state.slots_LP[0].tolist()
            slots[slot], slots[other] = slots[other], slots[slot]
            if state.rank_P[slot] == top_A[0] != state.rank_P[other]:
                results.append(after(slots, state))
        best = min((r for r in results if r is not None), default=None)
        if best is not None and best < state.most_L[0]:
            assert swap.after_A[0] == best
            state.swap(np.array([0]), swap.slot_A, swap.other_A)
            assert loads_of(state.slots_LP[0].tolist(), state) == state.loads_LR[0].tolist()
        else:
            assert swap.after_A[0] >= state.most_L[0]


@pytest.mark.parametrize(("num_experts", "num_slots"), CASES)
def test_a_replacement_is_found_where_there_is_one(
    num_experts: int, num_slots: tuple[int, ...]
) -> None:
    found = 0
    for seed in range(25):
        state = state_of(seed, num_experts, num_slots)
        top = int(state.loads_LR[0].argmax())
        replacement = best_replacement(state, np.array([0]), np.array([top]), least=1)
        results: dict[bool, list[int]] = {True: [], False: []}
        for slot, expert in itertools.product(range(sum(num_slots)), range(num_experts)):
            slots = state.slots_LP[0].tolist()
            slots[slot] = expert
            is_on_top = state.rank_P[slot] == top
            is_wanted = is_on_top or bool(state.held_LER[0, expert, top])
            result = after(slots, state)
            if result is not None and is_wanted and expert != state.slots_LP[0, slot]:
                results[bool(is_on_top)].append(result)
        elsewhere = [r for r in results[False] if r < state.most_L[0]]
        if better := elsewhere or [r for r in results[True] if r < state.most_L[0]]:
            # The others' loads count as if the new expert gave them no relief: no less than true.
            assert min(better) <= replacement.after_A[0]
        if replacement.after_A[0] < state.most_L[0]:
            found += 1
            state.replace(np.array([0]), replacement.slot_A, replacement.other_A)
            assert loads_of(state.slots_LP[0].tolist(), state) == state.loads_LR[0].tolist()
            assert state.counts_LE[0].tolist() == [
                state.slots_LP[0].tolist().count(expert) for expert in range(num_experts)
            ]
    assert found > 0 or sum(num_slots) < num_experts + 2


def test_improving_leaves_a_state_that_adds_up() -> None:
    rng = np.random.default_rng(1)
    load_LE = (rng.random((5, 19)) ** 4 * 1e9).astype(np.int64)
    num_slots = (7, 7, 6, 6)
    counts_LE = replicate(load_LE, 26, most=4)
    state = LayerLoads(
        load_LE=load_LE, slots_LP=pack(load_LE, counts_LE, num_slots), num_slots=num_slots
    )
    before_L = state.most_L
    improve(state, least=1)
    again = LayerLoads(load_LE=load_LE, slots_LP=state.slots_LP.copy(), num_slots=num_slots)
    assert (state.loads_LR == again.loads_LR).all()
    assert (state.held_LER == again.held_LER).all()
    assert (state.counts_LE == again.counts_LE).all()
    assert (state.most_L <= before_L).all() and (state.most_L < before_L).any()


def test_replicas_are_packed_though_only_ranks_with_their_expert_have_room() -> None:
    # Expert 0 comes last and twice, when rank 0 alone has room, for two.
    load_LE = np.array([[1, 90, 30, 30, 29]])
    slots_LP = pack(load_LE, np.array([[2, 1, 1, 1, 1]]), (3, 3))
    assert sorted(slots_LP[0].tolist()) == [0, 0, 1, 2, 3, 4]
    assert sorted(slots_LP[0, :3].tolist())[0] == sorted(slots_LP[0, 3:].tolist())[0] == 0


def test_a_budget_is_spent_where_it_gains_most() -> None:
    slots = np.zeros(1, dtype=np.int64)

    def options(*pairs: tuple[int, float]) -> list[Option]:
        return [Option(moves, most, slots) for moves, most in pairs]

    layers = [
        options((0, 10.0), (1, 9.5), (2, 4.0)),
        options((0, 10.0), (1, 8.0), (3, 7.0)),
        options((0, 3.0)),
    ]
    wanted = {0: (0, 0), 1: (0, 1), 2: (2, 0), 3: (2, 1), 4: (2, 1), 5: (2, 3), 9: (2, 3)}
    for max_moves, moves in wanted.items():
        chosen = choose(layers, max_moves)
        assert tuple(option.moves for option in chosen[:2]) == moves


def least_most(load_E: list[int], num_ranks: int, num_slots: int) -> float:
    """Load of the fullest rank in the most even of all placements without repeats."""
    sets = itertools.combinations(range(len(load_E)), num_slots)
    best = float(sum(load_E))
    for ranks in itertools.combinations_with_replacement(list(sets), num_ranks):
        counts = [sum(expert in own for own in ranks) for expert in range(len(load_E))]
        if min(counts) > 0:
            best = min(best, max(sum(load_E[e] / counts[e] for e in own) for own in ranks))
    return best


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_slots"), [(8, 2, 5), (6, 3, 3), (5, 4, 2), (4, 4, 2)]
)
def test_of_few_experts_no_placement_is_more_even(
    num_experts: int, num_ranks: int, num_slots: int
) -> None:
    load_LE = (np.random.default_rng(7).random((6, num_experts)) ** 3 * 1e6).astype(np.int64)
    placement = balance(load_LE, (num_slots,) * num_ranks)
    most_L = rank_loads(load_LE, placement).max(axis=1)
    for load_E, most in zip(load_LE.tolist(), most_L.tolist(), strict=True):
        assert most == pytest.approx(least_most(load_E, num_ranks, num_slots), rel=1e-9)
