"""Read what all families share from a Hugging Face config."""

from __future__ import annotations

import math
from typing import Any, cast

from moe_serve.errors import CheckpointError
from moe_serve.models.spec import AttentionSpec, DecoderSpec, LayerSpec, RopeKind, RopeSpec

# transformers' config classes; their fields are not typed.
HFConfig = Any

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_NEEDED_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def decoder_spec(config: HFConfig, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    """The spec around the layers."""
    return DecoderSpec(
        architecture=config.architectures[0],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=layers,
        norm_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
        max_position=config.max_position_embeddings,
        eos_token_ids=token_ids(config.eos_token_id, "config.json: eos_token_id"),
    )


def attention_spec(config: HFConfig, **differences: Any) -> AttentionSpec:
    """Heads and rope from the config; the family passes what is its own.

    `head_dim` null or absent means hidden_size / heads.
    """
    num_heads = config.num_attention_heads
    if num_heads < 1:
        raise CheckpointError(f"config.json: num_attention_heads {num_heads} must be at least 1")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads
        if config.num_key_value_heads is None
        else config.num_key_value_heads,
        head_dim=head_dim,
        rope=rope_spec(config, head_dim),
        **differences,
    )


def activation(config: HFConfig) -> str:
    """The gated activation's name in `kernels.silu_mul`."""
    if config.hidden_act not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[config.hidden_act]


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """null, one id or a list of ids. `field` names the place in an error."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise CheckpointError(f"{field} {value!r} must be a token id or a list of them")
    return tuple(ids)


def rope_spec(config: HFConfig, head_dim: int) -> RopeSpec:
    """From `config.rope_parameters`, where transformers gathers every older style.

    Raises `CheckpointError` for a rope type that is not known here, and for a missing field.
    """
    fields = dict(config.rope_parameters or {})
    kind = fields.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"config.json: rope_type {kind!r} is not supported; known: {', '.join(_ROPE_KINDS)}"
        )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {fields['partial_rotary_factor']} is not part of "
            f"{config.architectures[0]}: its heads rotate whole"
        )
    for name in ("rope_theta", *_NEEDED_ROPE_FIELDS[kind]):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(
                f"config.json: rope_parameters.{name} is {value!r}; rope type {kind!r} needs a "
                "positive number"
            )
    return RopeSpec(
        theta=float(fields["rope_theta"]),
        rotary_dim=head_dim,
        kind=cast(RopeKind, kind),
        factor=float(fields.get("factor") or 1.0),
        original_max_position=fields.get("original_max_position_embeddings") or 0,
        low_freq_factor=float(fields.get("low_freq_factor") or 1.0),
        high_freq_factor=float(fields.get("high_freq_factor") or 4.0),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(fields) if kind == "yarn" else 1.0,
        truncate=bool(fields.get("truncate", True)),
    )


def _yarn_attention_factor(fields: dict[str, Any]) -> float:
    """The given one; else 0.1 ln(factor) + 1, weighed by `mscale` where both of its fields are."""
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])

    def temperature(weight: float) -> float:
        factor = float(fields["factor"])
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return temperature(fields["mscale"]) / temperature(fields["mscale_all_dim"])
    return temperature(1.0)
