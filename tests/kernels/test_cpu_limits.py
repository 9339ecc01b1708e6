"""What is measured as a limit is what was done."""

from __future__ import annotations

import torch

from moe_serve.kernels.cpu.library import Library
from moe_serve.kernels.cpu.limits import multiply_only, read_all


def test_all_of_the_memory_is_read(kernels: Library) -> None:
    data = torch.zeros(3 << 18)
    data[5], data[1 << 18], data[-1] = 1.0, 2.0, 4.0
    assert read_all(data, kernels) == 7.0


def test_operations_are_counted(kernels: Library) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        one, three = (multiply_only(rounds, dtype, kernels) for rounds in (1, 3))
        assert three == 3 * one and one % (2 * 2 * 8) == 0
