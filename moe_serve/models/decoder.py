"""Builds and runs any decoder that a spec can describe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_serve.context import LayerKV, StepContext
from moe_serve.experts.load import ExpertLoad
from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.layers.attention import Attention
from moe_serve.layers.embedding import Embedding, gather_logits
from moe_serve.layers.mlp import DenseMLP
from moe_serve.layers.moe import MoE
from moe_serve.layers.norm import RMSNorm
from moe_serve.layers.projection import Projection
from moe_serve.layers.rotary import CosSin, RotaryTable
from moe_serve.models.spec import DecoderSpec, LayerSpec, MoESpec
from moe_serve.ranks import SINGLE_RANK, Ranks, StepTokens

# Shapes: T tokens of the step in this lane, t rows of the rank's token slice, R rows that need
# logits, D model, V vocabulary, L MoE layers, K top-k.


class DecoderLayer(nn.Module):
    """Attention, then an MLP, each on the normalised stream and added to it.

    The stream lies in token slices, one a rank of the lane. What a branch gives is added by the
    norm that comes next, which reads both anyway: a layer takes and gives the stream and what is
    still to be added to it.
    """

    def __init__(
        self,
        spec: LayerSpec,
        decoder: DecoderSpec,
        moe_index: int,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(
            spec.attention, size, eps, ranks.shard, dtype=dtype, device=device
        )
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp: MoE | DenseMLP
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MoE(spec.mlp, size, moe_index, ranks, dtype=dtype, device=device)
        else:
            self.mlp = DenseMLP(spec.mlp, size, ranks.shard, dtype=dtype, device=device)

    def forward(
        self,
        x_tD: Tensor,
        y_tD: Tensor | None,
        angles: CosSin | None,
        context: StepContext,
        kv: LayerKV,
        tokens: StepTokens,
        load: ExpertLoad | None,
    ) -> tuple[Tensor, Tensor]:
        """`y_tD` None: nothing is to be added yet. `angles` None: the lane has no tokens, and only
        joins what crosses lanes.
        """
        x_tD, normed_tD = self.attention_norm.add_and_norm(x_tD, y_tD)
        if angles is not None:
            z_tD = self.attention(normed_tD, angles, context, kv, tokens.slices)
            x_tD, normed_tD = self.mlp_norm.add_and_norm(x_tD, z_tD)
        if isinstance(self.mlp, MoE):
            return x_tD, self.mlp(normed_tD, tokens, load)
        return x_tD, normed_tD if angles is None else self.mlp(normed_tD, tokens.slices)


class Decoder(nn.Module):
    """Weights are left unset: `loader.load_model` fills them. They are those of this rank."""

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.ranks = ranks
        self.dtype = dtype
        self.device = device
        self.embedding = Embedding(
            spec.vocab_size,
            spec.hidden_size,
            ranks.shard,
            scale=spec.embedding_scale,
            dtype=dtype,
            device=device,
        )
        self.layers = nn.ModuleList(self._build_layers())
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.head: Projection | None = None
        if not spec.tie_embeddings:
            own = ranks.shard.vocab(spec.vocab_size)
            self.head = Projection(spec.hidden_size, own.size, dtype=dtype, device=device)
        # Of a table that serves both ends, packed: a copy.
        self.tied_head: PackedWeight | None = None
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
                DecoderLayer(
                    layer, self.spec, moe_index, self.ranks, dtype=self.dtype, device=self.device
                )
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
        num_tokens_of_lanes: Sequence[int] | None = None,
        routes_LtK: Tensor | None = None,
    ) -> Tensor:
        """Run the lane's tokens through all layers -> final hidden states [T, D], on every rank.

        Writes their K/V into `kv` (one entry a layer) and counts each routed token in `load`, at
        one rank. All ranks of all lanes call it together, with or without tokens. `routes_LtK`, if
        there is one, gets the experts that the tokens of this rank's slice choose.
        """
        lanes = num_tokens_of_lanes or [context.num_tokens]
        tokens = self.ranks.step(lanes, context.phases_T, context.num_valid_1, routes_LtK)
        tables = self._tables if context.num_tokens else {}
        length = max(context.context_lens, default=0)
        angles = {rope: table.lookup(context.positions_T, length) for rope, table in tables.items()}
        x_tD, y_tD = self.embedding(token_ids_T, tokens.slices), None
        for layer, spec, layer_kv in zip(self.layers, self.spec.layers, kv, strict=True):
            turn = angles.get(spec.attention.rope)
            x_tD, y_tD = layer(x_tD, y_tD, turn, context, layer_kv, tokens, load)
        return tokens.slices.gather(self.norm.add_and_norm(x_tD, y_tD).normed)

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor | None:
        """Scores of the next token -> [R, V] fp32 at the lane's leader; None at its other ranks."""
        weight_VD: Tensor | PackedWeight = self.tied_head or self.embedding.weight_VD
        if self.head is not None:
            weight_VD = self.head.weight_ND
        logits_RV = gather_logits(hidden_RD, weight_VD, self.spec.vocab_size, self.ranks.lane)
        if logits_RV is None:
            return None
        logits_RV = logits_RV.float()
        return logits_RV if self.spec.logit_scale == 1.0 else logits_RV * self.spec.logit_scale
