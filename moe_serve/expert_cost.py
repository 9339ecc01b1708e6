"""Measures what experts cost on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.step_cost import StepCost

# Weights that were used last may still be in a cache, as those of a whole model are not: so several
# layers take turns, but not all of a large model, which would take long.
MOST_BANKS = 8
MOST_BYTES = 2**30
MANY_ROWS = 32
NUM_RUNS = 3


@torch.inference_mode()
def measure_cost(banks: Sequence[ExpertBank]) -> StepCost | None:
    """By running each expert with one row, and with many. None where this rank has no expert.

    Estimates: what dispatch and the router take is not in them, and a small model stays in caches.
    """
    banks = _some([bank for bank in banks if bank.num_experts])
    if not banks:
        return None
    few, many = (
        statistics.median(_seconds(banks, rows) for _ in range(NUM_RUNS)) for rows in (1, MANY_ROWS)
    )
    num_experts = sum(bank.num_experts for bank in banks)
    row_seconds = max(0.0, (many - few) / (num_experts * (MANY_ROWS - 1)))
    return StepCost(
        read_seconds=max(0.0, few / num_experts - row_seconds),
        row_seconds=row_seconds,
        source=f"measured at start on {banks[0].gate_up_EGD.device.type}, rank 0",
    )


def _some(banks: Sequence[ExpertBank]) -> list[ExpertBank]:
    chosen: list[ExpertBank] = []
    num_bytes = 0
    for bank in banks[:MOST_BANKS]:
        num_bytes += bank.gate_up_EGD.nbytes + bank.down_EDF.nbytes
        if chosen and num_bytes > MOST_BYTES:
            break
        chosen.append(bank)
    return chosen


def _seconds(banks: Sequence[ExpertBank], rows: int) -> float:
    """Of one pass through all of them, each expert with that many rows."""
    weights = banks[0].gate_up_EGD
    counts_E = torch.full((banks[0].num_experts,), rows, dtype=torch.int64, device=weights.device)
    rows_RD = torch.ones(
        rows * banks[0].num_experts, weights.shape[2], dtype=weights.dtype, device=weights.device
    )
    _wait(weights.device)
    started = time.perf_counter()
    for bank in banks:
        # Gate and up alone where a rank holds another part of the down projection.
        acts_RF = bank.activate(rows_RD, counts_E)
        if bank.inner_size == bank.down_inner_size:
            bank.project(acts_RF, counts_E)
    _wait(weights.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
