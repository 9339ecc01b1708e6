"""The Mixture-of-Experts block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.layer import ExpertPath, make_expert_path
from moe_serve.experts.load import ExpertLoad
from moe_serve.experts.placement import LayerPlacement
from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.elementwise import sigmoid
from moe_serve.kernels.linear import linear
from moe_serve.layers.mlp import GatedMLP
from moe_serve.layers.projection import Projection, empty_parameter
from moe_serve.models.spec import MoESpec
from moe_serve.ranks import Ranks, StepTokens
from moe_serve.routing.router import RouterSpec, Routing, route

# Shapes: T tokens, t rows of the token slice, D model, C phases, E experts, L MoE layers, K top-k.


class Router(nn.Module):
    """Scores every expert. Weights and logits are fp32 whatever the model's dtype.

    Two experts may differ by less than one bf16 step: rounded logits would choose another one.
    """

    def __init__(
        self, spec: RouterSpec, num_experts: int, hidden_size: int, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self.weight_ED: Tensor | PackedWeight = empty_parameter(
            num_experts, hidden_size, dtype=torch.float32, device=device
        )

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E] fp32."""
        return linear(x_TD, self.weight_ED)

    def forward(
        self,
        x_TD: Tensor,
        load_CE: Tensor | None = None,
        phases_T: Tensor | None = None,
        num_valid_1: Tensor | None = None,
    ) -> Routing:
        """`load_CE` grows by the choices of all rows but padding: those from `num_valid_1` on."""
        return route(
            self.logits(x_TD),
            self.spec,
            load_CE=load_CE,
            phases_T=phases_T,
            num_valid_1=num_valid_1,
        )


class MoE(nn.Module):
    """Routed experts, plus the shared expert where the spec has one, on the rank's token slice.

    `moe_index` counts the MoE layers below this one: its row in `ExpertLoad`. A rank without
    tokens still takes part, since others may need its experts.
    """

    def __init__(
        self,
        spec: MoESpec,
        hidden_size: int,
        moe_index: int,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.moe_index = moe_index
        self.router = Router(spec.router, spec.num_experts, hidden_size, device)
        shard = ranks.shard
        self.experts = ExpertBank(
            len(shard.experts(moe_index, spec.num_experts)),
            hidden_size,
            shard.expert_inner(spec.inner_size).size,
            spec.activation,
            dtype,
            device,
            shard.expert_down_columns(spec.inner_size).size,
        )
        self._ranks, self._device = ranks, device
        self.place(shard.layer_placement(moe_index, spec.num_experts))
        self.shared: GatedMLP | None = None
        self.shared_gate: Projection | None = None
        if spec.shared is not None:
            self.shared = GatedMLP(
                hidden_size, spec.shared.inner_size, spec.activation, dtype=dtype, device=device
            )
            if spec.shared.has_gate:
                self.shared_gate = Projection(hidden_size, 1, dtype=dtype, device=device)

    def place(self, placement: LayerPlacement) -> None:
        """From now on the bank's slots, here and on other ranks, are taken to hold these experts.

        To be called between two steps, on all ranks between the same two.
        """
        ranks, layout = self._ranks, self._ranks.layout
        group = ranks.experts if layout.expert_parallel else ranks.lane
        self.path: ExpertPath = make_expert_path(
            layout, group, placement, ranks.all2all_backend, self._device
        )

    def forward(self, x_tD: Tensor, tokens: StepTokens, load: ExpertLoad | None) -> Tensor:
        if not tokens.capacity:
            return x_tD
        # Padding is neither routed nor counted.
        x_TD = x_tD[: tokens.slices.num_valid]
        load_CE = rows_1 = None
        if load is not None:
            load_CE = load.counts_LCE[self.moe_index]
            if self._ranks.layout.expert_size > 1:
                rows_1 = load.rows_L[self.moe_index : self.moe_index + 1]
        routing = self.router(x_TD, load_CE, tokens.phases_T, tokens.num_valid_1)
        if tokens.routes_LtK is not None:
            tokens.routes_LtK[self.moe_index, : x_TD.shape[0]] = routing.ids_TK
        y_TD = self.path.run(x_TD, routing, self.experts, tokens.capacity, rows_1)
        if self.shared is not None:
            y_TD = y_TD + self._shared(x_TD, self.shared)
        missing = x_tD.shape[0] - x_TD.shape[0]
        return F.pad(y_TD, (0, 0, 0, missing)) if missing else y_TD

    def _shared(self, x_TD: Tensor, shared: GatedMLP) -> Tensor:
        y_TD: Tensor = shared(x_TD)
        if self.shared_gate is None:
            return y_TD
        return (y_TD * sigmoid(self.shared_gate(x_TD))).to(x_TD.dtype)
