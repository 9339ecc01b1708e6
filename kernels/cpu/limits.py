"""What the machine can do at most with the instructions of a library, for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.cpu.calls import DTYPES, LimitCall
from moe_serve.kernels.cpu.library import Library


def read_all(data: Tensor, library: Library) -> float:
    """Reads whole megabytes of memory, and adds them up as fp32."""
    arguments = LimitCall(data.data_ptr(), data.nbytes, 0, 0, library.num_threads)
    return float(library.kernels.moe_serve_read(arguments))


def multiply_only(rounds: int, dtype: torch.dtype, library: Library) -> float:
    """Products of values that stand in registers, or tiles; returns the operations done, of which
    a multiplication and an addition are two.
    """
    arguments = LimitCall(0, 0, rounds, DTYPES[dtype], library.num_threads)
    return float(library.kernels.moe_serve_peak(arguments))
