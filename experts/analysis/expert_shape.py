"""The routed experts of a model, read off its Hugging Face config.json. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_serve.errors import ConfigError

Fields = dict[str, Any]

# Families spell these in many ways; the first that is there counts.
_HIDDEN = ("hidden_size", "d_model")
_INNER = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size",
    "intermediate_size",
)  # fmt: skip
_EXPERTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
    "ffn_config.moe_num_experts",
)  # fmt: skip
_TOP_K = (
    "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "ffn_config.moe_top_k",
    "num_selected_experts",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")

# Which layers have routed experts: fields that families have for it, and what changes nothing.
_RULES = {
    "first_k_dense_replace": 0,
    "moe_layer_num_skipped": 0,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "interleave_moe_layer_step": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 2**31,
    "moe_layer_interval": 1,
}

# Bytes of an element.
ROW_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of a weight. mxfp4: 4 bits, and a scale of 8 bits for each 32 (OCP Microscaling Formats
# specification 1.0); the scales of fp8's blocks of 128 x 128 are too few to tell.
QUANTIZED_BYTES = {"fp8": 1.0, "mxfp4": 4.25 / 8, "fp4": 4.25 / 8}
# Activations of experts without a gate: two matrices instead of three.
_UNGATED = ("relu2",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """`hidden` (D) and `inner` (F) sizes of each expert, and how many there are.

    `num_matrices`: gate, up and down, or without a gate. `row_bytes`: an element of a row;
    `weight_bytes`: a weight, scales included.
    """

    model_type: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    num_matrices: int = 3
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"

    @property
    def num_weights(self) -> int:
        """Of one expert in one layer."""
        return self.num_matrices * self.hidden * self.inner

    @property
    def row_bytes(self) -> int:
        return ROW_BYTES[self.dtype]

    @property
    def expert_bytes(self) -> int:
        weight_bytes = (ROW_BYTES | QUANTIZED_BYTES)[self.weight_dtype]
        return round(self.num_weights * weight_bytes)


def read_shape(path: Path, dtype: str | None = None) -> ExpertShape:
    """From a config.json or the folder that has one. `dtype`: of rows and weights, in place of its.

    Raises `ConfigError` naming the file and the field.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"--config {file}: not readable JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--config {file}: must hold a JSON object")
    try:
        shape = shape_of(fields)
    except ConfigError as error:
        raise ConfigError(f"--config {file}: {error}") from None
    return shape if dtype is None else dataclasses.replace(shape, dtype=dtype, weight_dtype=dtype)


def shape_of(fields: Fields) -> ExpertShape:
    """Raises `ConfigError` naming the field that is missing, or that is not understood."""
    text = fields.get("text_config")
    fields = fields | text if isinstance(text, dict) else fields
    model_type = str(fields.get("model_type", "unknown"))
    if fields.get("zero_expert_num"):
        raise ConfigError(
            f"zero_expert_num {fields['zero_expert_num']} of model_type {model_type!r}: experts "
            "without weights are not understood"
        )
    dtype, weight_dtype = _dtypes(fields)
    activation = fields.get("mlp_hidden_act") or fields.get("hidden_act")
    return ExpertShape(
        model_type=model_type,
        num_layers=_num_moe_layers(fields, model_type),
        num_experts=_number(fields, _EXPERTS, model_type),
        top_k=_number(fields, _TOP_K, model_type),
        hidden=_number(fields, _HIDDEN, model_type),
        inner=_number(fields, _INNER, model_type),
        num_matrices=2 if activation in _UNGATED else 3,
        dtype=dtype,
        weight_dtype=weight_dtype,
    )


def _number(fields: Fields, names: Iterable[str], model_type: str) -> int:
    """The first of `names` that is there; a list, one number a layer, must repeat one."""
    for name in names:
        value: Any = fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            continue
        if isinstance(value, list) and len({str(one) for one in value}) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} {value!r}: must be a whole number, the same in each layer")
        return value
    raise ConfigError(f"model_type {model_type!r} has none of {', '.join(names)}")


def _num_moe_layers(fields: Fields, model_type: str) -> int:
    """Layers with routed experts, by whichever rules the config has fields for."""
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.count("E")
    num_layers = _number(fields, _LAYERS, model_type)
    listed = fields.get("moe_layer_freq")
    if isinstance(listed, list) and len(listed) != num_layers:
        raise ConfigError(f"moe_layer_freq has {len(listed)} entries, but {num_layers} layers")
    rules = {name: _rule(fields, name, default) for name, default in _RULES.items()}
    count = sum(
        _is_moe(rules, layer)
        and layer not in (fields.get("mlp_only_layers") or ())
        and (not isinstance(listed, list) or bool(listed[layer]))
        for layer in range(num_layers)
    )
    if not count:
        raise ConfigError(f"model_type {model_type!r}: no layer has routed experts")
    return count


def _rule(fields: Fields, name: str, default: int) -> int:
    value = fields.get(name)
    if value is None or (name == "moe_layer_freq" and isinstance(value, list)):
        return default
    least = min(default, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} {value!r}: must be a whole number from {least} on")
    return value


def _is_moe(rules: dict[str, int], layer: int) -> bool:
    """Each rule holds for every layer where its default stands."""
    return (
        layer >= max(rules["first_k_dense_replace"], rules["moe_layer_num_skipped"])
        and layer % rules["moe_layer_freq"] == 0
        and (layer + 1) % rules["decoder_sparse_step"] == 0
        and (layer + 1) % rules["interleave_moe_layer_step"] == 0
        and layer % rules["expert_layer_period"] == rules["expert_layer_offset"]
        and rules["moe_layer_start_index"] <= layer <= rules["moe_layer_end_index"]
        and (layer + 1) % rules["moe_layer_interval"] == 0
    )


def _dtypes(fields: Fields) -> tuple[str, str]:
    """Of rows and of weights; rows are bfloat16 where the config does not tell, as in serving."""
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    if dtype not in ROW_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(ROW_BYTES)}; give --dtype")
    quantization = fields.get("quantization_config") or {}
    weight_dtype = fields.get("expert_dtype") or quantization.get("quant_method") or dtype
    if weight_dtype not in ROW_BYTES | QUANTIZED_BYTES:
        raise ConfigError(
            f"weights of {weight_dtype!r}: known are {', '.join(ROW_BYTES | QUANTIZED_BYTES)}; "
            "give --dtype"
        )
    return dtype, weight_dtype
