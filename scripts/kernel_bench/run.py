"""Runs cases, one row of the table each; a case that fails is a row too."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_bench.case import Case, ExactCase, Problem
from kernel_bench.poison import poisoned_memory
from moe_serve.bench.gpu_ruler import Ceilings, copies_to_miss_cache, is_cold, time_calls
from moe_serve.bench.ruler import Spread

HEADER = (
    "| op | shape | T | us [quartiles] | TFLOP/s | GB/s | % of copy | % of matmul | baseline "
    "| baseline / ours | error |\n|" + "---|" * 11
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`status`: "right", "wrong", or what went wrong. Nothing is timed without a GPU.

    `is_cold`: inputs come from memory, and not from the L2 cache. `ratio`: baseline's time / ours.
    """

    op: str
    shape: str
    tokens: int
    status: str
    seconds: float = 0.0
    error: float | None = None
    ours: Spread | None = None
    is_cold: bool = False
    flop_rate: float = 0.0
    byte_rate: float = 0.0
    share_of_copy: float = 0.0
    share_of_matmul: float = 0.0
    baseline: str = ""
    theirs: Spread | None = None

    @property
    def ratio(self) -> float | None:
        return self.theirs.median / self.ours.median if self.theirs and self.ours else None

    def markdown(self) -> str:
        speed = ["not timed", "", "", "", ""]
        if self.ours is not None:
            speed = [
                f"{self.ours.median:.1f} [{self.ours.low:.1f}, {self.ours.high:.1f}]"
                + ("" if self.is_cold else " in L2"),
                f"{self.flop_rate / 1e12:.1f}",
                f"{self.byte_rate / 1e9:.0f}",
                f"{self.share_of_copy:.0%}",
                f"{self.share_of_matmul:.0%}",
            ]
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        error = "" if self.error is None else f"{self.error:.1e}"
        if self.status != "right":
            error = f"{error} {self.status}".strip()
        cells = [self.op, self.shape, str(self.tokens), *speed, self.baseline, ratio, error]
        return "| " + " | ".join(cells) + " |"

    def fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"ratio": self.ratio}


def run_case(case: Case, device: torch.device, ceilings: Ceilings | None, budget_us: float) -> Row:
    """`ceilings` None: check, and time nothing."""
    began = time.monotonic()
    row = Row(op=case.op, shape=case.shape, tokens=case.tokens, status="right")
    try:
        problem = _make(case, device, 0)
        with poisoned_memory():
            result = problem.run()
        error = problem.check(result)
        row = dataclasses.replace(row, error=error, status=_status(error, case.limit))
        del result
        if ceilings is not None:
            row = _timed(row, case, problem, device, ceilings, budget_us)
    except Exception as error:  # the rest of the table is worth having
        row = dataclasses.replace(row, status=describe(error))
    return dataclasses.replace(row, seconds=round(time.monotonic() - began, 2))


def run_exact(case: ExactCase, device: torch.device) -> dict[str, Any]:
    """Fields: op, shape, and whether `rows_agree`, or why that is not known."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"op": case.op, "shape": case.shape, "rows_agree": None, "status": ""}
    try:
        with poisoned_memory():
            found["rows_agree"] = case.check(device)
    except Exception as error:
        found["status"] = describe(error)
    return found


def describe(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"failed: {type(error).__name__}: {first[:200]}".replace("|", "/")


def is_gpu_lost(device: torch.device) -> bool:
    """Whether a kernel's fault has left this process without its GPU."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _make(case: Case, device: torch.device, number: int) -> Problem:
    torch.manual_seed(number)
    return case.make(device, number)


def _status(error: float, limit: float) -> str:
    return "right" if error <= limit else f"wrong: more than {limit:g}"


def _timed(
    row: Row,
    case: Case,
    problem: Problem,
    device: torch.device,
    ceilings: Ceilings,
    budget_us: float,
) -> Row:
    num_bytes = int(problem.num_bytes)
    num_copies = copies_to_miss_cache(num_bytes, device)
    problems = [problem, *(_make(case, device, number) for number in range(1, num_copies))]
    ours = time_calls([each.run for each in problems], budget_us=budget_us)
    seconds = ours.median * 1e-6
    row = dataclasses.replace(
        row,
        ours=ours,
        is_cold=is_cold(num_bytes, num_copies, device),
        flop_rate=problem.flops / seconds,
        byte_rate=num_bytes / seconds,
        share_of_copy=num_bytes / seconds / ceilings.copy,
        share_of_matmul=problem.flops / seconds / ceilings.matmul,
    )
    baselines = [each.baseline for each in problems if each.baseline is not None]
    return _against(row, case, baselines, budget_us) if baselines else row


def _against(row: Row, case: Case, baselines: Sequence[Callable[[], Any]], budget_us: float) -> Row:
    is_captured = case.is_baseline_captured
    try:
        theirs = time_calls(baselines, is_captured=is_captured, budget_us=budget_us)
    except Exception as error:  # torch's failure is not ours
        return dataclasses.replace(row, baseline=f"{case.baseline} {describe(error)}")
    name = case.baseline + ", gaps included" * (not is_captured)
    return dataclasses.replace(row, baseline=name, theirs=theirs)
