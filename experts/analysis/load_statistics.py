"""How uneven a load is: over experts, over ranks, and between two recordings. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.experts.placement import Placement

# Shapes: L MoE layers, E logical experts, R ranks, P slots of all ranks.
# A load is any count or rate that is not negative; none of these functions changes its input.

Floats = npt.NDArray[np.float64]
Load = npt.NDArray[Any]


class HotExpert(NamedTuple):
    """`x_mean`: its load over the mean of its layer."""

    layer: int
    expert: int
    load: float
    x_mean: float


class Move(NamedTuple):
    """An expert whose share of its layer's load, 0 to 1, is another now."""

    layer: int
    expert: int
    before: float
    after: float


class Drift(NamedTuple):
    """`distance_L`: total variation distance, half the sum over experts of |after - before|, of
    each layer's shares: 0 the same, 1 no expert in common. `moves`: furthest first."""

    distance_L: Floats
    moves: list[Move]


def slot_loads(load_LE: Load, placement: Placement) -> Floats:
    """[L, P]: an expert's load, shared evenly by its replicas."""
    slots_LP = placement.slots_LP
    assert load_LE.shape == (placement.num_layers, placement.num_experts)
    replicas_LE = replica_counts(placement)
    return np.take_along_axis(load_LE / replicas_LE, slots_LP, axis=1)


def replica_counts(placement: Placement) -> npt.NDArray[np.int64]:
    """[L, E]: slots that hold each expert."""
    return count_slots(placement.slots_LP, placement.num_experts)


def count_slots(slots_LP: npt.NDArray[Any], num_experts: int) -> npt.NDArray[np.int64]:
    """[L, E]: in how many slots each logical expert lies."""
    num_layers = len(slots_LP)
    flat = (slots_LP + np.arange(num_layers)[:, None] * num_experts).ravel()
    return np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def sum_by_rank(values_LP: Load, placement: Placement) -> Floats:
    """[L, R]: sums over each rank's slots; 0 for a rank without slots."""
    sums_LR = np.zeros((len(values_LP), placement.num_ranks))
    start = 0
    for rank, count in enumerate(placement.slots_of_ranks):
        sums_LR[:, rank] = values_LP[:, start : start + count].sum(1)
        start += count
    return sums_LR


def rank_loads(load_LE: Load, placement: Placement) -> Floats:
    """[L, R]: the load of each rank where replicas share their expert's load evenly.

    Example: loads 6 2 of two experts, slots 0 | 0 1: 3 | 5.
    """
    return sum_by_rank(slot_loads(load_LE, placement), placement)


def balancedness(load_LR: Load) -> Floats:
    """[L]: mean over ranks / maximum over ranks; 1 is perfect, and a layer without load is 1."""
    means_L, highest_L = load_LR.mean(1, dtype=np.float64), load_LR.max(1).astype(np.float64)
    even_L: Floats = np.divide(means_L, highest_L, out=np.ones_like(means_L), where=highest_L > 0)
    return even_L


def shares(load_LE: Load) -> Floats:
    """[L, E]: of each layer's load; zeros for a layer without load."""
    sums_L1 = load_LE.sum(1, keepdims=True, dtype=np.float64)
    share_LE: Floats = np.divide(load_LE, sums_L1, out=np.zeros(load_LE.shape), where=sums_L1 > 0)
    return share_LE


def entropy(load_LE: Load) -> Floats:
    """[L]: Shannon entropy of a layer's shares over that of an even load, log(E).

    1: all experts alike; 0: one expert gets all. 1 for a layer without load or of one expert.
    """
    share_LE = shares(load_LE)
    logs_LE = np.log(share_LE, out=np.zeros_like(share_LE), where=share_LE > 0)
    num_experts = load_LE.shape[1]
    if num_experts < 2:
        return np.ones(len(load_LE))
    entropy_L = -(share_LE * logs_LE).sum(1) / np.log(num_experts)
    return np.where(share_LE.any(1), np.clip(entropy_L, 0, 1), 1.0)


def gini(load_LE: Load) -> Floats:
    """[L]: Gini coefficient: mean absolute difference of two experts / twice the mean load.

    0: all experts alike; (E - 1) / E: one expert gets all. 0 for a layer without load.
    Example: loads 1 3: 0.25.
    """
    share_LE = np.sort(shares(load_LE), axis=1)
    num_experts = load_LE.shape[1]
    weights_E = 2 * np.arange(1, num_experts + 1) - num_experts - 1
    gini_L: Floats = share_LE @ weights_E / num_experts
    return np.clip(gini_L, 0, 1)


def hot_share(load_LE: Load, count: int) -> Floats:
    """[L]: share of the `count` experts of a layer with the most load."""
    highest_LE = -np.sort(-shares(load_LE), axis=1)
    total_L: Floats = highest_LE[:, :count].sum(1)
    return total_L


def hottest_over_mean(load_LE: Load) -> Floats:
    """[L]: highest load / mean load; 1 for a layer without load."""
    return 1 / balancedness(load_LE)


def dead_experts(load_LE: Load) -> list[list[int]]:
    """By layer: the experts that were never chosen, where any was."""
    return [np.flatnonzero(row == 0).tolist() if row.any() else [] for row in load_LE]


def hot_list(load_LE: Load, count: int) -> list[HotExpert]:
    """The `count` experts furthest above the mean of their layer, hottest first.

    Of equals the lower layer comes first, then the lower expert. None without load.
    """
    x_mean_LE = shares(load_LE) * load_LE.shape[1]
    order = np.argsort(-x_mean_LE, axis=None, kind="stable")[:count]
    layers, experts = np.unravel_index(order, load_LE.shape)
    return [
        HotExpert(layer, expert, float(load_LE[layer, expert]), float(x_mean_LE[layer, expert]))
        for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True)
        if x_mean_LE[layer, expert] > 0
    ]


def drift(before_LE: Load, after_LE: Load, count: int) -> Drift:
    """How far the shares of two loads lie apart, and the `count` experts that moved most.

    A layer where either load is nothing tells nothing: distance 0, no moves.
    """
    assert before_LE.shape == after_LE.shape
    is_told_L1 = before_LE.any(1, keepdims=True) & after_LE.any(1, keepdims=True)
    share_before_LE, share_after_LE = shares(before_LE), shares(after_LE)
    distance_LE = np.abs(share_after_LE - share_before_LE) * is_told_L1
    order = np.argsort(-distance_LE, axis=None, kind="stable")[:count]
    moves = [
        Move(layer, expert, float(before), float(after))
        for layer, expert, before, after in zip(
            *(axis.tolist() for axis in np.unravel_index(order, before_LE.shape)),
            share_before_LE.flat[order],
            share_after_LE.flat[order],
            strict=True,
        )
        if distance_LE[layer, expert] > 0
    ]
    return Drift(np.clip(distance_LE.sum(1) / 2, 0, 1), moves)
