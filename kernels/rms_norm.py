"""Root-mean-square norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension -> x's shape and dtype.

    The statistics are fp32; the weight multiplies after the cast back, as transformers does.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight_D * (x32 * scale).to(x.dtype)
