"""The expert weights that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.kernels.grouped_gemm import grouped_gemm
from moe_serve.kernels.silu_mul import gated_activation

# Shapes: R rows sorted by expert, E experts, D model, F expert inner, G = 2F (gate rows first).


class ExpertBank(nn.Module):
    """`gate_up_EGD` [E, 2F, D] and `down_EDF` [E, D, F]: each expert's weights stand together."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.activation = activation

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up_EGD = empty(num_experts, 2 * inner_size, hidden_size)
        self.down_EDF = empty(num_experts, hidden_size, inner_size)

    def forward(self, rows_RD: Tensor, counts: list[int]) -> Tensor:
        """Each row through its expert -> [R, D]. `counts`: rows per expert, in order."""
        gate_up_RG = grouped_gemm(rows_RD, self.gate_up_EGD, counts)
        return grouped_gemm(gated_activation(gate_up_RG, self.activation), self.down_EDF, counts)
