"""Measures what experts cost on this machine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.step_cost import StepCost

# Weights that were used last may still be in a cache, as those of a whole model are not: so several
# layers take turns, but not all of a large model.
MOST_BANKS = 8
MOST_BYTES = 2**30
MANY_ROWS = 32
# All that the start of a server is slowed for it, unless that gives fewer than so many samples. Of
# three the first may be slow: a GPU's kernels may have to be compiled for it.
MOST_SECONDS = 0.03
LEAST_SAMPLES = 3


@torch.inference_mode()
def measure_cost(banks: Sequence[ExpertBank]) -> StepCost | None:
    """By running each expert with one row, and with many. None where this rank has no expert.

    Estimates: what dispatch and the router take is not in them, and a small model stays in caches.
    """
    banks = _some([bank for bank in banks if bank.num_experts])
    if not banks:
        return None
    few, many = _sample(banks)
    row_seconds = max(0.0, (many - few) / (MANY_ROWS - 1))
    return StepCost(
        read_seconds=max(0.0, few - row_seconds),
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


def _sample(banks: Sequence[ExpertBank]) -> tuple[float, float]:
    """Seconds of one expert with one row, and with many: medians, the banks taking turns."""
    few: list[float] = []
    many: list[float] = []
    started = time.perf_counter()
    for bank in itertools.cycle(banks):
        few.append(_seconds(bank, 1) / bank.num_experts)
        many.append(_seconds(bank, MANY_ROWS) / bank.num_experts)
        if len(few) >= LEAST_SAMPLES and time.perf_counter() - started >= MOST_SECONDS:
            break
    return statistics.median(few), statistics.median(many)


def _seconds(bank: ExpertBank, rows: int) -> float:
    """Of one pass through the bank, each expert with that many rows."""
    weights = bank.gate_up_EGD
    counts_E = torch.full((bank.num_experts,), rows, dtype=torch.int64, device=weights.device)
    rows_RD = torch.ones(
        rows * bank.num_experts, weights.shape[2], dtype=weights.dtype, device=weights.device
    )
    _wait(weights.device)
    started = time.perf_counter()
    # Gate and up alone where a rank holds another part of the down projection.
    acts_RF = bank.activate(rows_RD, counts_E)
    if bank.inner_size == bank.down_inner_size:
        bank.project(acts_RF, counts_E)
    _wait(weights.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
