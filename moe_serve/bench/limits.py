"""What this machine can do at most, measured: what every share of a limit refers to.

Each rate is the best of several ways, torch's and where they are active those of our CPU kernels,
with the threads that torch has now.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from moe_serve.bench.ruler import Call, Clock, time_calls
from moe_serve.bench.table import Table
from moe_serve.kernels.cpu.library import active
from moe_serve.kernels.cpu.limits import multiply_only, read_all
from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.linear import linear

# Far beyond any cache; a square matrix whose product takes tens of milliseconds.
READ_BYTES = 256 << 20
MATMUL_SIZE = 2048
_ROW = 8192
_NAMES = {
    "read": "memory read, GB/s",
    "copy": "memory copy, read and written, GB/s",
    "float32": "float32 matmul, GFLOP/s",
    "bfloat16": "bfloat16 matmul, GFLOP/s",
    "int8": "int8 matmul, GOP/s",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes a second that are read, and that a copy reads and writes; operations a second of
    matrix products (a multiplication and an addition are two). 0: there is no way here.
    """

    num_threads: int
    read: float
    copy: float
    float32: float
    bfloat16: float
    int8: float

    @classmethod
    def measure(
        cls,
        *,
        num_bytes: int = READ_BYTES,
        size: int = MATMUL_SIZE,
        clock: Clock = time.perf_counter_ns,
    ) -> Limits:
        """Takes a second or two."""
        return cls(
            num_threads=torch.get_num_threads(),
            read=_read_rate(num_bytes, clock),
            copy=_copy_rate(num_bytes, clock),
            float32=_matmul_rate(size, torch.float32, clock),
            bfloat16=_matmul_rate(size, torch.bfloat16, clock),
            int8=_int8_rate(size, clock),
        )

    def operations(self, dtype: torch.dtype) -> float:
        """Of products in this dtype; float16 is taken for bfloat16."""
        return self.float32 if dtype == torch.float32 else self.bfloat16


def limits_table(before: Limits, after: Limits | None = None) -> str:
    """`after`: measured again at the end. A machine that others share, or whose clock changes, has
    other limits then, and what was measured in between lies somewhere between two truths.
    """
    columns = ["before", "after"] if after is not None else ["measured"]
    table = Table([f"limit, {before.num_threads} threads", *columns])
    for name, text in _NAMES.items():
        found = [getattr(one, name) / 1e9 for one in (before, after) if one is not None]
        table.add(text, *(f"{rate:.1f}" if rate else "not offered" for rate in found))
    return str(table)


def _best(calls: Sequence[Call], clock: Clock) -> float:
    """Seconds of the fastest."""
    return min(time_calls([call], budget_us=150_000.0, clock=clock).low for call in calls) / 1e6


def _read_rate(num_bytes: int, clock: Clock) -> float:
    matrix = torch.ones(max(1, num_bytes // 4 // _ROW), _ROW)
    vector = torch.ones(_ROW)
    ways: list[Call] = [matrix.sum, matrix.amax, lambda: torch.mv(matrix, vector)]
    library = active()
    if library is not None:
        ways.append(lambda: read_all(matrix, library))
    return matrix.nbytes / _best(ways, clock)


def _copy_rate(num_bytes: int, clock: Clock) -> float:
    source = torch.ones(max(1, num_bytes // 4))
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best([lambda: target.copy_(source)], clock)


def _matmul_rate(size: int, dtype: torch.dtype, clock: Clock) -> float:
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    ways: list[Call] = [lambda: a @ b, lambda: F.linear(a, b)]
    library = active()
    if library is not None:
        packed = PackedWeight.pack(b.clone(), library)
        ways.append(lambda: linear(a, packed))
    rate = 2 * size**3 / _best(ways, clock)
    if library is None:
        return rate
    # Nothing but multiplications, about as many.
    rounds = max(1, size**3 // 2**10 // library.num_threads)
    seconds = _best([lambda: multiply_only(rounds, dtype, library)], clock)
    return max(rate, multiply_only(rounds, dtype, library) / seconds)


def _int8_rate(size: int, clock: Clock) -> float:
    multiply: Any = getattr(torch, "_int_mm", None)
    if multiply is None:
        return 0.0
    a, b = (torch.randint(-127, 128, (size, size), dtype=torch.int8) for _ in range(2))
    try:
        return 2 * size**3 / _best([lambda: multiply(a, b), lambda: multiply(a, b.t())], clock)
    except RuntimeError:  # what torch says where the processor has no such kernel
        return 0.0
