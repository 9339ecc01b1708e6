"""What a load is on ranks: how even, what that costs, and what other placements would give. Pure.

All that is seconds is an estimate: `StepCost` on the rows of a mean step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moe_serve.experts.analysis import load_statistics
from moe_serve.experts.analysis.load_statistics import Floats
from moe_serve.experts.balance import BalanceGoal, balance
from moe_serve.experts.placement import Placement, slots_of_ranks
from moe_serve.experts.recording import LoadRecording

# Shapes: L MoE layers, E logical experts, R ranks, P slots of all ranks.

# Slots that each rank might have more.
MORE_SLOTS = (1, 2, 4)
# Every expert on two ranks at least: what it costs to lose none with a rank.
COVERING = "each expert on 2 ranks"


def expert_seconds(recording: LoadRecording, placement: Placement) -> Floats | None:
    """[L, R]: expected in a mean step; None where cost or steps are not known."""
    if recording.cost is None or not recording.num_steps:
        return None
    rows_LP = load_statistics.slot_loads(recording.counts_LE / recording.num_steps, placement)
    return load_statistics.sum_by_rank(recording.cost.slot_seconds(rows_LP), placement)


def count_moves(before: Placement, after: Placement) -> int:
    """Experts of a layer that a rank has to be sent: those it holds after, but not before."""
    return sum(
        len(set(new) - set(old))
        for layer_before, layer_after in zip(before.layers, after.layers, strict=True)
        for old, new in zip(layer_before.experts, layer_after.experts, strict=True)
    )


def rank_part(recording: LoadRecording, placement: Placement, source: str) -> dict[str, Any]:
    """The part "ranks" of the report; see `report`."""
    placed = under_placement(recording)
    measured_LR = placed.rows_WLR.sum(0)
    is_measured = (
        placement is recording.placement
        and bool(measured_LR.any())
        and may_be_rows_of(placed, placement)
    )
    predicted_LR = load_statistics.rank_loads(recording.counts_LE, placement)
    load_LR = measured_LR if is_measured else predicted_LR
    even_L = load_statistics.balancedness(load_LR)
    return {
        "num_ranks": placement.num_ranks,
        "num_slots": placement.num_slots,
        "num_redundant": placement.num_slots - placement.num_experts,
        "slots_of_ranks": list(placement.slots_of_ranks),
        "sole_experts": _sole_experts(placement),
        "placement": source,
        "source": "measured" if is_measured else "predicted",
        "load": load_LR.tolist(),
        "balancedness": balancedness_part(even_L),
        "busiest": _busiest(load_LR),
    }


def under_placement(recording: LoadRecording) -> LoadRecording:
    """The windows that are known to be under its placement; all, where that is not known."""
    windows = len(recording.steps_W)
    count = windows if recording.windows_placed is None else recording.windows_placed
    if count == windows:
        return recording
    first = windows - count
    return dataclasses.replace(
        recording,
        counts_WCLE=recording.counts_WCLE[first:],
        tokens_WC=recording.tokens_WC[first:],
        steps_W=recording.steps_W[first:],
        seconds_W=recording.seconds_W[first:],
        rows_WLR=recording.rows_WLR[first:],
    )


def may_be_rows_of(recording: LoadRecording, placement: Placement) -> bool:
    """Whether ranks that hold these experts can have computed the measured rows.

    A rank computes all rows of experts that no other holds, and none of those it does not hold.
    Where experts moved meanwhile that fails; always so, if no expert has replicas and load moved.
    """
    counts_LE, rows_LR = recording.counts_LE, recording.rows_WLR.sum(0)
    if rows_LR.shape[1] != placement.num_ranks:
        return False
    own_LE = np.where(load_statistics.replica_counts(placement) == 1, counts_LE, 0)
    least_LR, most_LR = (
        load_statistics.sum_by_rank(np.take_along_axis(of_LE, placement.slots_LP, 1), placement)
        for of_LE in (own_LE, counts_LE)
    )
    return bool(((least_LR <= rows_LR) & (rows_LR <= most_LR)).all())


def balancedness_part(even_L: Floats) -> dict[str, Any]:
    return {
        "mean": float(even_L.mean()),
        "min": float(even_L.min()),
        "worst_layer": int(even_L.argmin()),
        "layers": even_L.tolist(),
    }


def cost_part(recording: LoadRecording, placement: Placement) -> dict[str, Any] | None:
    """The part "cost" of the report; None where cost or steps are not known."""
    seconds_LR = expert_seconds(recording, placement)
    if seconds_LR is None:
        return None
    assert recording.cost is not None
    slowest_L, mean_L = seconds_LR.max(1), seconds_LR.mean(1)
    step_ms = 1e3 * float(recording.seconds_W.sum()) / recording.num_steps
    lost_ms, expert_ms = 1e3 * float((slowest_L - mean_L).sum()), 1e3 * float(slowest_L.sum())
    return {
        "source": recording.cost.source,
        "read_seconds": recording.cost.read_seconds,
        "row_seconds": recording.cost.row_seconds,
        "expert_ms": expert_ms,
        "lost_ms": lost_ms,
        "lost_share_of_experts": lost_ms / expert_ms if expert_ms else 0.0,
        "step_ms": step_ms or None,
        "lost_share_of_step": lost_ms / step_ms if step_ms else None,
        "lost_ms_of_layers": (1e3 * (slowest_L - mean_L)).tolist(),
    }


def rebalancing_part(recording: LoadRecording, placement: Placement) -> list[dict[str, Any]]:
    """The part "rebalancing" of the report: as it is, balanced, and balanced with more slots."""
    num_ranks, num_experts = placement.num_ranks, placement.num_experts
    if num_ranks < 2 or not recording.counts_LE.any():
        return []
    rows = [_option(recording, placement, placement, "now")]
    balanced = balance(recording.counts_LE, placement.slots_of_ranks, current=placement)
    rows.append(_option(recording, placement, balanced, "balanced"))
    for more in MORE_SLOTS:
        num_slots = placement.num_slots + more * num_ranks
        if num_slots <= num_experts * num_ranks:
            slots = slots_of_ranks(num_slots, num_ranks)
            other = balance(recording.counts_LE, slots)
            rows.append(_option(recording, placement, other, f"balanced, {more} more a rank"))
    slots = slots_of_ranks(max(placement.num_slots, 2 * num_experts), num_ranks)
    covering = balance(recording.counts_LE, slots, goal=BalanceGoal(min_replicas=2))
    rows.append(_option(recording, placement, covering, COVERING))
    return rows


def _option(
    recording: LoadRecording, now: Placement, placement: Placement, name: str
) -> dict[str, Any]:
    load_LR = load_statistics.rank_loads(recording.counts_LE, placement)
    even_L = load_statistics.balancedness(load_LR)
    seconds_LR = expert_seconds(recording, placement)
    moves = count_moves(now, placement)
    more = max(
        new - old for old, new in zip(now.slots_of_ranks, placement.slots_of_ranks, strict=True)
    )
    bytes_known = recording.expert_bytes > 0
    return {
        "name": name,
        "num_slots": placement.num_slots,
        "num_redundant": placement.num_slots - placement.num_experts,
        "balancedness_mean": float(even_L.mean()),
        "balancedness_min": float(even_L.min()),
        "expert_ms": None if seconds_LR is None else 1e3 * float(seconds_LR.max(1).sum()),
        "moves": moves,
        "moved_bytes": moves * recording.expert_bytes if bytes_known else None,
        "more_bytes_of_rank": (
            more * placement.num_layers * recording.expert_bytes if bytes_known else None
        ),
    }


def _sole_experts(placement: Placement) -> list[int]:
    """By rank, over all layers: experts that no other rank holds, and that are lost with it."""
    is_sole_LE = load_statistics.replica_counts(placement) == 1
    is_sole_LP = np.take_along_axis(is_sole_LE, placement.slots_LP, axis=1)
    sums_LR = load_statistics.sum_by_rank(is_sole_LP, placement)
    return [int(count) for count in sums_LR.sum(0)]


def _busiest(load_LR: Floats) -> dict[str, Any]:
    """The rank with most rows in all layers; `x_mean` where each layer waits for its busiest.

    `x_mean`: sum over layers of the busiest rank's load / that of the mean.
    """
    means = float(load_LR.mean(1).sum())
    return {
        "rank": int(load_LR.sum(0).argmax()),
        "x_mean": float(load_LR.max(1).sum()) / means if means else 1.0,
    }
