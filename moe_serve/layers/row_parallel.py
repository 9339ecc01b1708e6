"""A projection of columns that lie on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.linear import linear
from moe_serve.layers.projection import empty_parameter
from moe_serve.parallel.shard import Span
from moe_serve.parallel.slices import TokenSlices

# Shapes: T tokens of the lane, t rows of the token slice, C columns, c own columns, N out.


class RowParallel(nn.Module):
    """Own columns of all tokens -> the whole result for the own token slice.

    `columns`: those of the weight that this rank holds. Where it holds all of them, the ranks
    exchange activations, and each projects its slice on its own. Otherwise each projects its
    columns, and the parts are summed in order of rank.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        columns: Span,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.is_whole = columns.size == in_size
        self.weight_ND: Tensor | PackedWeight = empty_parameter(
            out_size, columns.size, dtype=dtype, device=device
        )
        self.bias_N = empty_parameter(out_size, dtype=dtype, device=device) if has_bias else None

    def forward(self, x_Tc: Tensor, slices: TokenSlices) -> Tensor:
        if self.is_whole:
            return linear(slices.exchange(x_Tc), self.weight_ND, self.bias_N)
        y_tN = slices.reduce_scatter(linear(x_Tc, self.weight_ND))
        return y_tN if self.bias_N is None else y_tN + self.bias_N
