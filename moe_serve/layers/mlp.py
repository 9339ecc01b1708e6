"""The gated MLP of dense layers and shared experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.kernels.silu_mul import gated_activation
from moe_serve.layers.projection import Projection

# Shapes: T tokens, D model.


class DenseMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up lie in one matrix, gate first."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = Projection(hidden_size, 2 * inner_size, dtype=dtype, device=device)
        self.down = Projection(inner_size, hidden_size, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.down(gated_activation(self.gate_up(x_TD), self.activation))
        return y_TD
