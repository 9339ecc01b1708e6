"""A dense projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.linear import linear

# Shapes: T tokens, D in, N out.


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that the loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Projection(nn.Module):
    """x @ weight.T + bias. Several matrices with the same input may lie in it, row after row."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight_ND: Tensor | PackedWeight = empty_parameter(
            out_size, in_size, dtype=dtype, device=device
        )
        self.bias_N = empty_parameter(out_size, dtype=dtype, device=device) if has_bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        return linear(x_TD, self.weight_ND, self.bias_N)
