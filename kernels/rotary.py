"""Rotary position embedding, halves layout (the one of Hugging Face checkpoints)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x_THh: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
    """Rotate the first r of h dimensions; the rest passes through -> [T, H, h] in x's dtype.

    Dimension i < r/2 turns with dimension i + r/2. `cos_Tr`, `sin_Tr` hold both halves, in x's
    dtype.
    Example, r = h = 2, x = (1, 0), angle a: (cos a, sin a).
    """
    rotary_dim = cos_Tr.shape[-1]
    turning = x_THh[..., :rotary_dim]
    cos, sin = cos_Tr[:, None], sin_Tr[:, None]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    if rotary_dim == x_THh.shape[-1]:
        return turned
    return torch.cat((turned, x_THh[..., rotary_dim:]), dim=-1)
