"""What a benchmark is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BF16, FP32 = torch.bfloat16, torch.float32


class Problem(NamedTuple):
    """A call on one set of inputs.

    - `run`: what is measured. `baseline`: the same by torch.
    - `check`: its result -> how far that is from the reference in fp32 (`ruler.difference`).
    - `flops`, `num_bytes`: what must be computed and moved at least: weights of the experts that
      are used once, inputs and outputs once, keys and values of each sequence once.
    """

    run: Callable[[], Any]
    check: Callable[[Any], float]
    flops: float
    num_bytes: float
    baseline: Callable[[], Any] | None = None


class Case(NamedTuple):
    """`make(device, number)`: inputs of that number. On the device "meta" they take no memory, and
    `run` only shows which kernels there are to compile.

    `limit`: a result farther than that from the reference is wrong.
    """

    op: str
    shape: str
    tokens: int
    make: Callable[[torch.device, int], Problem]
    limit: float = 1e-2
    baseline: str = ""
    # One that waits for the GPU cannot be captured.
    is_baseline_captured: bool = True


class ExactCase(NamedTuple):
    """`check(device)`: whether rows have the same bits alone and in company."""

    op: str
    shape: str
    check: Callable[[torch.device], bool]
