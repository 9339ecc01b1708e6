"""Gated MLPs: one that a single rank computes, and one split over the ranks of a lane."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.cpu.products import linear_activation_cpu
from moe_serve.kernels.silu_mul import gated_activation
from moe_serve.layers.projection import Projection
from moe_serve.layers.row_parallel import RowParallel
from moe_serve.models.shard import ModelShard
from moe_serve.models.spec import DenseMLPSpec
from moe_serve.parallel.slices import TokenSlices

# Shapes: T tokens, t rows of the token slice, D model.


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), whole: a shared expert, on its rank's token slice.

    Gate and up lie in one matrix, gate first.
    """

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
        y_TD: Tensor = self.down(_activate(self.gate_up, x_TD, self.activation))
        return y_TD


class DenseMLP(nn.Module):
    """The same as a layer of its own, its inner dimension split: token slice in, slice out."""

    def __init__(
        self,
        spec: DenseMLPSpec,
        hidden_size: int,
        shard: ModelShard,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.activation = spec.activation
        own, columns = shard.inner(spec.inner_size), shard.down_columns(spec.inner_size)
        self.gate_up = Projection(hidden_size, 2 * own.size, dtype=dtype, device=device)
        self.down = RowParallel(spec.inner_size, hidden_size, columns, dtype=dtype, device=device)

    def forward(self, x_tD: Tensor, slices: TokenSlices) -> Tensor:
        acts = _activate(self.gate_up, slices.gather(x_tD), self.activation)
        y_tD: Tensor = self.down(acts, slices)
        return y_tD


def _activate(gate_up: Projection, x_TD: Tensor, activation: str) -> Tensor:
    """[T, D] through both projections -> [T, F]."""
    weight = gate_up.weight_ND
    if isinstance(weight, PackedWeight) and weight.is_paired:
        return linear_activation_cpu(x_TD, weight, activation)
    return gated_activation(gate_up(x_TD), activation)
