"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.kernels.rms_norm import AddedNorm, add_rms_norm, rms_norm
from moe_serve.layers.projection import empty_parameter


class RMSNorm(nn.Module):
    """Over the last dimension, of `size`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight_D = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight_D, self.eps)

    def add_and_norm(self, x: Tensor, y: Tensor | None) -> AddedNorm:
        """The residual stream x + y, rounded to its dtype, and its norm: on a GPU one pass.

        `y` None: nothing is to be added.
        """
        if y is None:
            return AddedNorm(x, self(x))
        return add_rms_norm(x, y, self.weight_D, self.eps)
