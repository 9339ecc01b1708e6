"""Qwen2-MoE: a gated shared expert, biased q/k/v, dense layers and windows by layer."""

from __future__ import annotations

from moe_serve.models.names import CheckpointNames
from moe_serve.models.qwen3_moe import is_sparse
from moe_serve.models.reading import HFConfig, activation, attention_spec, decoder_spec
from moe_serve.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseMLPSpec,
    LayerSpec,
    MoESpec,
    SharedExpertSpec,
)
from moe_serve.routing.router import RouterSpec

NAMES = CheckpointNames()


def spec(config: HFConfig) -> DecoderSpec:
    layers = tuple(
        LayerSpec(attention=_attention(config, i), mlp=_mlp(config, i))
        for i in range(config.num_hidden_layers)
    )
    return decoder_spec(config, layers)


def _attention(config: HFConfig, layer_index: int) -> AttentionSpec:
    is_windowed = config.layer_types[layer_index] == "sliding_attention"
    return attention_spec(
        config,
        has_qkv_bias=config.qkv_bias,
        window=config.sliding_window if is_windowed else None,
    )


def _mlp(config: HFConfig, layer_index: int) -> DenseMLPSpec | MoESpec:
    if not is_sparse(config, layer_index):
        return DenseMLPSpec(inner_size=config.intermediate_size, activation=activation(config))
    return MoESpec(
        num_experts=config.num_experts,
        inner_size=config.moe_intermediate_size,
        router=RouterSpec(top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob),
        shared=SharedExpertSpec(inner_size=config.shared_expert_intermediate_size, has_gate=True),
        activation=activation(config),
    )
