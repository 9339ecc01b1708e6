"""Mixtral: every layer MoE, top-k weights renormalised, one window for all layers or none."""

from __future__ import annotations

from moe_serve.models.names import CheckpointNames
from moe_serve.models.reading import HFConfig, activation, attention_spec, decoder_spec
from moe_serve.models.spec import DecoderSpec, LayerSpec, MoESpec
from moe_serve.routing.router import RouterSpec

# transformers calls the block "mlp" when it saves its stacked tensors as they are.
NAMES = CheckpointNames(
    moe_prefixes=("block_sparse_moe", "mlp"), expert_gate="w1", expert_up="w3", expert_down="w2"
)


def spec(config: HFConfig) -> DecoderSpec:
    layer = LayerSpec(
        attention=attention_spec(config, window=config.sliding_window),
        mlp=MoESpec(
            num_experts=config.num_local_experts,
            inner_size=config.intermediate_size,
            router=RouterSpec(top_k=config.num_experts_per_tok, renormalize=True),
            activation=activation(config),
        ),
    )
    return decoder_spec(config, (layer,) * config.num_hidden_layers)
