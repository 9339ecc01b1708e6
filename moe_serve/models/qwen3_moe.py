"""Qwen3-MoE: q/k norm per head, no shared expert, dense layers where the config says so."""

from __future__ import annotations

from moe_serve.models.names import CheckpointNames
from moe_serve.models.reading import HFConfig, activation, attention_spec, decoder_spec
from moe_serve.models.spec import DecoderSpec, DenseMLPSpec, LayerSpec, MoESpec
from moe_serve.routing.router import RouterSpec

NAMES = CheckpointNames()


def spec(config: HFConfig) -> DecoderSpec:
    # The config class nulls sliding_window unless use_sliding_window is set.
    attention = attention_spec(
        config,
        qk_norm="head",
        has_qkv_bias=config.attention_bias,
        has_output_bias=config.attention_bias,
        window=config.sliding_window,
    )
    layers = tuple(
        LayerSpec(attention=attention, mlp=_moe(config) if is_sparse(config, i) else _dense(config))
        for i in range(config.num_hidden_layers)
    )
    return decoder_spec(config, layers)


def is_sparse(config: HFConfig, layer_index: int) -> bool:
    """Whether a layer of the Qwen families has experts."""
    return (
        layer_index not in config.mlp_only_layers
        and config.num_experts > 0
        and (layer_index + 1) % config.decoder_sparse_step == 0
    )


def _dense(config: HFConfig) -> DenseMLPSpec:
    return DenseMLPSpec(inner_size=config.intermediate_size, activation=activation(config))


def _moe(config: HFConfig) -> MoESpec:
    return MoESpec(
        num_experts=config.num_experts,
        inner_size=config.moe_intermediate_size,
        router=RouterSpec(top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob),
        activation=activation(config),
    )
