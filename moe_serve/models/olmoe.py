"""OLMoE: every layer MoE, q/k norm over whole projections, optional clamp, never a window."""

from __future__ import annotations

from moe_serve.models.names import CheckpointNames
from moe_serve.models.reading import HFConfig, activation, attention_spec, decoder_spec
from moe_serve.models.spec import DecoderSpec, LayerSpec, MoESpec
from moe_serve.routing.router import RouterSpec

NAMES = CheckpointNames()


def spec(config: HFConfig) -> DecoderSpec:
    layer = LayerSpec(
        attention=attention_spec(
            config,
            qk_norm="projection",
            has_qkv_bias=config.attention_bias,
            has_output_bias=config.attention_bias,
            clip_qkv=config.clip_qkv,
        ),
        mlp=MoESpec(
            num_experts=config.num_experts,
            inner_size=config.intermediate_size,
            router=RouterSpec(top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob),
            activation=activation(config),
        ),
    )
    return decoder_spec(config, (layer,) * config.num_hidden_layers)
