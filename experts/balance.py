"""Which expert lies in which slot, so that ranks carry alike. Pure.

Replicas go to the experts that carry most (balancing/replication.py), the heaviest replica to the
lightest rank (balancing/packing.py), and small changes follow until none helps
(balancing/local_search.py). The first two are what DeepSeek published as EPLB
(github.com/deepseek-ai/EPLB), except that no rank gets an expert twice; the third makes up for what
a greedy choice misses. What that algorithm reaches is a bar that uneven layers are tried again for
(balancing/solve.py). It can stay out of reach, as a handful of experts on a few ranks may lie more
evenly if one of them is on a rank twice. The same input gives the same placement on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.experts.balancing.balance_goal import BalanceGoal, BalanceTask
from moe_serve.experts.balancing.layer_loads import held_by
from moe_serve.experts.balancing.node_groups import experts_of_nodes
from moe_serve.experts.balancing.overlap import slots_in_order
from moe_serve.experts.balancing.rebalance import rebalance
from moe_serve.experts.balancing.solve import solve
from moe_serve.experts.placement import Placement, slots_of_ranks
from moe_serve.parallel.shard import split

__all__ = ["BalanceGoal", "balance"]

# Shapes: L MoE layers, E logical experts, R ranks, P slots of all ranks, rank by rank, N nodes, X
# experts of a node.

Ints = npt.NDArray[np.int64]


def balance(
    load_LE: npt.NDArray[Any],
    num_slots: Sequence[int],
    *,
    current: Placement | None = None,
    goal: BalanceGoal | None = None,
) -> Placement:
    """A placement for these loads [L, E] on ranks with these slots, which differ by one at most.

    Every expert is on one rank at least, on none twice. In no layer is the fullest rank fuller than
    in the linear placement with as many slots, nor than in `current`, as far as those meet the
    goal. With `current`, what stays on a rank stays in its slot, and of placements that are about
    as even the one with the fewest moves is taken. Raises `PlacementError`.
    """
    task = BalanceTask.of(load_LE, num_slots, goal or BalanceGoal())
    if not len(load_LE):
        return Placement(())
    fresh_LP = _not_worse_than_linear(task, _solve(task))
    if current is None:
        held_LER = held_by(fresh_LP, task.num_slots, task.num_experts)
        return Placement.of_slots(slots_in_order(held_LER), task.num_slots)
    return rebalance(task, fresh_LP, current)


def _solve(task: BalanceTask) -> Ints:
    if not task.goal.keeps_groups:
        return solve(task.load_LE, task.filled, task.goal.min_replicas)
    ways = experts_of_nodes(task.load_LE, task.goal.num_groups, task.goal.num_nodes)
    best_LP, *others = (_solve_by_node(task, expert_LNX) for expert_LNX in ways)
    for other_LP in others:
        is_better_L = task.layer_loads(other_LP).most_L < task.layer_loads(best_LP).most_L
        best_LP = np.where(is_better_L[:, None], other_LP, best_LP)
    return best_LP


def _solve_by_node(task: BalanceTask, expert_LNX: Ints) -> Ints:
    slots_NR = np.array(task.num_slots).reshape(task.goal.num_nodes, -1)
    parts = []
    for node, own_R in enumerate(slots_NR.tolist()):
        expert_LX = expert_LNX[:, node]
        load_LX = np.take_along_axis(task.load_LE, expert_LX, axis=1)
        filled = tuple(count for count in own_R if count)
        slots_LP = solve(load_LX, filled, task.goal.min_replicas)
        parts.append(np.take_along_axis(expert_LX, slots_LP, axis=1))
    return np.concatenate(parts, axis=1)


def _not_worse_than_linear(task: BalanceTask, slots_LP: Ints) -> Ints:
    """Layers that are no better than in the linear placement are as there."""
    num_ranks, total = len(task.num_slots), sum(task.num_slots)
    if task.num_slots != slots_of_ranks(total, num_ranks):
        return slots_LP
    linear_LP = _linear(task).repeat(len(slots_LP), axis=0)
    is_linear_L = task.layer_loads(linear_LP).most_L <= task.layer_loads(slots_LP).most_L
    is_linear_L &= task.is_met(linear_LP)
    return np.where(is_linear_L[:, None], linear_LP, slots_LP)


def _linear(task: BalanceTask) -> Ints:
    """[1, P]: as `Placement.make` lays experts out, which takes longer."""
    num_experts, num_ranks = task.num_experts, len(task.num_slots)
    parts = [split(num_experts, rank, num_ranks) for rank in range(num_ranks)]
    runs = [
        (part.start if part.size else 0) + np.arange(count)
        for part, count in zip(parts, task.num_slots, strict=True)
    ]
    return np.concatenate(runs)[None] % num_experts
