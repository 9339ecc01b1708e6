"""From the placement that there is to a more even one, with few moves. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import PlacementError
from moe_serve.experts.balancing.balance_goal import BalanceTask
from moe_serve.experts.balancing.layer_loads import LayerLoads, held_by
from moe_serve.experts.balancing.local_search import improve
from moe_serve.experts.balancing.move_budget import Option, choose, steps_from
from moe_serve.experts.balancing.overlap import num_moves, relabel, slots_like
from moe_serve.experts.placement import Placement

# Shapes: L MoE layers, E logical experts, R ranks, P slots of all ranks, rank by rank, O options.

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Fullest ranks that differ by less than this part of the mean are alike, and moves decide.
ALIKE = 1000


def rebalance(task: BalanceTask, fresh_LP: Ints, current: Placement) -> Placement:
    """`fresh_LP` [L, P] meets the goal, budget aside. Raises `PlacementError`."""
    _check_current(task, current)
    now_LP = current.slots_LP
    now_LER = held_by(now_LP, task.num_slots, task.num_experts)
    fresh_LER = held_by(fresh_LP, task.num_slots, task.num_experts)
    num_nodes = task.goal.num_nodes if task.goal.keeps_groups else 1
    fresh_LER = relabel(fresh_LER, now_LER, task.num_slots, num_nodes)
    fresh_LP = slots_like(fresh_LER, now_LP, task.num_slots)
    if task.goal.max_moves is None:
        best_LP = _best_of(task, now_LP, fresh_LP)
    else:
        best_LP = _within_budget(task, now_LP, fresh_LP, task.goal.max_moves)
    best_LER = held_by(best_LP, task.num_slots, task.num_experts)
    return Placement.of_slots(slots_like(best_LER, now_LP, task.num_slots), task.num_slots)


def _check_current(task: BalanceTask, current: Placement) -> None:
    have = (current.num_layers, current.num_experts, current.slots_of_ranks)
    want = (len(task.load_LE), task.num_experts, task.num_slots)
    if have != want:
        raise PlacementError(
            "the current placement has {} layers, {} experts, slots of ranks {}; "
            "wanted {}, {}, {}".format(*have, *want)
        )


def _best_of(task: BalanceTask, now_LP: npt.NDArray[Any], fresh_LP: Ints) -> Ints:
    """Of staying, improving step by step and starting afresh: the fewest moves that are alike."""
    state = _start(task, now_LP)
    improve(state, task.goal.min_replicas)
    options_OLP = np.stack((now_LP.astype(np.int64), state.slots_LP, fresh_LP))
    most_OL = np.stack([task.layer_loads(slots_LP).most_L for slots_LP in options_OLP])
    is_met_OL = np.stack([task.is_met(slots_LP) for slots_LP in options_OLP])
    now_LER = held_by(now_LP, task.num_slots, task.num_experts)
    moves_OL = np.stack(
        [
            num_moves(held_by(slots_LP, task.num_slots, task.num_experts), now_LER)
            for slots_LP in options_OLP
        ]
    )
    never = np.iinfo(np.int64).max
    most_OL[~is_met_OL] = never
    mean_L = task.load_LE.sum(axis=1) // len(task.num_slots)
    # Never worse than now, nor than afresh, which is no worse than the linear placement.
    limit_L = np.minimum(most_OL.min(axis=0) + mean_L // ALIKE, most_OL[[0, 2]].min(axis=0))
    is_alike_OL = most_OL <= limit_L
    order_OL = np.lexsort((most_OL, np.where(is_alike_OL, moves_OL, never)), axis=0)
    best_LP: Ints = options_OLP[order_OL[0], np.arange(len(now_LP))]
    return best_LP


def _within_budget(
    task: BalanceTask, now_LP: npt.NDArray[Any], fresh_LP: Ints, max_moves: int
) -> Ints:
    state = _start(task, now_LP)
    is_met_L = task.is_met(state.slots_LP)
    options = steps_from(
        state, now_LP.astype(np.int64), task.shift_L, task.goal.min_replicas, max_moves
    )
    fresh = task.layer_loads(fresh_LP)
    moves_L = num_moves(fresh.held_LER, task.layer_loads(now_LP).held_LER)
    most_L = np.ldexp(fresh.most_L.astype(np.float64), -task.shift_L)
    for layer, (moves, most) in enumerate(zip(moves_L.tolist(), most_L.tolist(), strict=True)):
        afresh = Option(moves, most, fresh_LP[layer])
        options[layer] = [*(options[layer] if is_met_L[layer] else []), afresh]
    chosen = choose(options, max_moves)
    return np.array([option.slots_P for option in chosen], dtype=np.int64).reshape(now_LP.shape)


def _start(task: BalanceTask, now_LP: npt.NDArray[Any]) -> LayerLoads:
    """The present placement, with the replicas that the goal misses where slots can be found."""
    closed_LER: Bools | None = None
    if task.goal.keeps_groups:
        closed_LER = task.nodes_of(now_LP)[..., None] != task.node_R
    state = task.layer_loads(now_LP, closed_LER)
    for layer in np.flatnonzero((state.counts_LE < task.goal.min_replicas).any(axis=1)).tolist():
        _add_missing(state, layer, task.goal.min_replicas)
    return state


def _add_missing(state: LayerLoads, layer: int, least: int) -> None:
    """Slots of experts with replicas to spare go to those that have too few; light ranks first."""
    for expert in np.flatnonzero(state.counts_LE[layer] < least).tolist():
        for _ in range(least - int(state.counts_LE[layer, expert])):
            spare_P = state.counts_LE[layer, state.slots_LP[layer]] > least
            barred_P = state.barred_LER[layer, expert, state.rank_P]
            free = np.flatnonzero(spare_P & ~barred_P)
            if not len(free):
                return
            slot = free[state.loads_LR[layer, state.rank_P[free]].argmin()]
            state.replace(np.array([layer]), np.array([slot]), np.array([expert]))
