"""Builds and runs any decoder that a spec can describe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_serve.context import LayerKV, StepContext
from moe_serve.experts.load import ExpertLoad
from moe_serve.kernels.linear import linear
from moe_serve.layers.attention import Attention
from moe_serve.layers.embedding import Embedding
from moe_serve.layers.mlp import DenseMLP
from moe_serve.layers.moe import MoE
from moe_serve.layers.norm import RMSNorm
from moe_serve.layers.projection import Projection
from moe_serve.layers.rotary import CosSin, RotaryTable
from moe_serve.models.spec import DecoderSpec, LayerSpec, MoESpec

# Shapes: T tokens of the step, R rows that need logits, D model, V vocabulary.


class DecoderLayer(nn.Module):
    """Attention, then an MLP, each on the normalised stream and added to it."""

    def __init__(
        self,
        spec: LayerSpec,
        decoder: DecoderSpec,
        moe_index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(spec.attention, size, eps, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp: MoE | DenseMLP
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MoE(spec.mlp, size, moe_index, dtype=dtype, device=device)
        else:
            self.mlp = DenseMLP(
                size, spec.mlp.inner_size, spec.mlp.activation, dtype=dtype, device=device
            )

    def forward(
        self,
        x_TD: Tensor,
        angles: CosSin,
        context: StepContext,
        kv: LayerKV,
        load: ExpertLoad | None,
    ) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), angles, context, kv)
        y_TD = self.mlp_norm(x_TD)
        mlp = self.mlp
        z_TD: Tensor = mlp(y_TD, load) if isinstance(mlp, MoE) else mlp(y_TD)
        return x_TD + z_TD


class Decoder(nn.Module):
    """Weights are left unset: `loader.load_model` fills them."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.embedding = Embedding(
            spec.vocab_size,
            spec.hidden_size,
            scale=spec.embedding_scale,
            dtype=dtype,
            device=device,
        )
        self.layers = nn.ModuleList(self._build_layers())
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.head: Projection | None = None
        if not spec.tie_embeddings:
            self.head = Projection(spec.hidden_size, spec.vocab_size, dtype=dtype, device=device)
        # Layers that turn alike share one table.
        self._tables = {
            layer.attention.rope: RotaryTable(
                layer.attention.rope, spec.max_position, device, dtype
            )
            for layer in spec.layers
        }

    def _build_layers(self) -> list[DecoderLayer]:
        layers, moe_index = [], 0
        for layer in self.spec.layers:
            layers.append(
                DecoderLayer(layer, self.spec, moe_index, dtype=self.dtype, device=self.device)
            )
            moe_index += isinstance(layer.mlp, MoESpec)
        return layers

    @torch.inference_mode()
    def forward(
        self,
        token_ids_T: Tensor,
        context: StepContext,
        kv: Sequence[LayerKV],
        load: ExpertLoad | None = None,
    ) -> Tensor:
        """Run the step's tokens through all layers -> final hidden states [T, D].

        Writes their K/V into `kv` (one entry a layer) and counts each routed token in `load`.
        """
        length = max(context.context_lens)
        angles = {
            rope: table.lookup(context.positions_T, length) for rope, table in self._tables.items()
        }
        x_TD = self.embedding(token_ids_T)
        for layer, spec, layer_kv in zip(self.layers, self.spec.layers, kv, strict=True):
            x_TD = layer(x_TD, angles[spec.attention.rope], context, layer_kv, load)
        hidden_TD: Tensor = self.norm(x_TD)
        return hidden_TD

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Scores of the next token -> [R, V] fp32."""
        if self.head is None:
            logits_RV = linear(hidden_RD, self.embedding.weight_VD).float()
        else:
            logits_RV = self.head(hidden_RD).float()
        return logits_RV if self.spec.logit_scale == 1.0 else logits_RV * self.spec.logit_scale
