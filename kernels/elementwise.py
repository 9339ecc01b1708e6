"""Activations whose value depends on their argument alone.

torch's own `sigmoid`, `silu` and `gelu` compute the last few elements of a call, and of each
thread's part of it, by other code than the rest: the same number gives another last bit there.
Its `exp`, `erf` and `tanh` do not, and the other operations are exact by IEEE 754.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) -> x's shape, in fp32."""
    return 1.0 / (1.0 + torch.exp(-x.float()))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) -> x's shape, in fp32."""
    x32 = x.float()
    return x32 / (1.0 + torch.exp(-x32))


def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """x * Phi(x) -> x's shape, in fp32; `tanh`: Hendrycks and Gimpel's approximation."""
    x32 = x.float()
    if tanh:
        inner = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32 * x32 * x32)
        return 0.5 * x32 * (1.0 + torch.tanh(inner))
    return 0.5 * x32 * (1.0 + torch.erf(x32 * math.sqrt(0.5)))
