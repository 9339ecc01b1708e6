"""The expert weights that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.kernels.cpu.packed import PackedWeight, memory_of
from moe_serve.kernels.cpu.products import moe_cpu
from moe_serve.kernels.grouped_gemm import grouped_gemm, grouped_gemm_activation

# Shapes: R rows sorted by expert, E experts of this rank, D model, F expert inner, G = 2F (gate
# rows first). A rank may hold a part of F only, and another part of it in the down projection.


class ExpertBank(nn.Module):
    """`gate_up_EGD` [E, 2F, D] and `down_EDF` [E, D, F]: each expert's weights stand together.

    `num_experts` of this rank, perhaps 0. `inner_size`: rows of each expert's gate, and of its up
    projection. `down_inner_size`: columns of its down projection, where these are not as many.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
        down_inner_size: int | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.activation = activation
        self.inner_size = inner_size
        self.down_inner_size = inner_size if down_inner_size is None else down_inner_size

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up_EGD: Tensor | PackedWeight = empty(num_experts, 2 * inner_size, hidden_size)
        self.down_EDF: Tensor | PackedWeight = empty(num_experts, hidden_size, self.down_inner_size)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The memory of both, one part an expert, in whatever order its elements stand."""
        return memory_of(self.gate_up_EGD), memory_of(self.down_EDF)

    @property
    def is_packed(self) -> bool:
        return isinstance(self.gate_up_EGD, PackedWeight) and isinstance(
            self.down_EDF, PackedWeight
        )

    def run_all(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, index_of_E: Tensor | None
    ) -> Tensor:
        """What `LocalDispatcher` and `forward` do, in one kernel and bit for bit; see `moe_cpu`."""
        gate_up, down = self.gate_up_EGD, self.down_EDF
        assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)
        return moe_cpu(x_TD, ids_TK, weights_TK, gate_up, down, self.activation, index_of_E)

    def activate(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Each row through its expert's gate and up -> [R, inner_size]."""
        return grouped_gemm_activation(rows_RD, self.gate_up_EGD, counts_E, self.activation)

    def project(self, acts_RF: Tensor, counts_E: Tensor, scatter_R: Tensor | None = None) -> Tensor:
        """[R, down_inner_size] through each row's down projection -> [R, D]."""
        return grouped_gemm(acts_RF, self.down_EDF, counts_E, scatter_R=scatter_R)

    def forward(self, rows_RD: Tensor, counts_E: Tensor, scatter_R: Tensor | None = None) -> Tensor:
        """Each row through its expert -> [R, D]; `counts_E` and `scatter_R` as in `grouped_gemm`.

        Where the rank holds a part of the inner size, so is the result a part of the sum.
        """
        return self.project(self.activate(rows_RD, counts_E), counts_E, scatter_R)
