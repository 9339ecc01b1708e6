"""The experts of a model, from the config.json of any family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import ConfigError
from moe_serve.experts.analysis.expert_shape import ExpertShape, shape_of

CONFIGS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "configs"

BASE = {"model_type": "x", "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 12,
        "num_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "num_layers"),
    [
        ({}, 12),
        ({"first_k_dense_replace": 3}, 9),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 5),
        ({"moe_layer_freq": [0] + [1] * 11}, 11),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}, 4),
        ({"interleave_moe_layer_step": 3}, 4),
        ({"expert_layer_period": 4, "expert_layer_offset": 1}, 3),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 10, "moe_layer_interval": 2}, 4),
        ({"hybrid_override_pattern": "MEM*E"}, 2),
    ],
)
def test_layers_with_experts_are_counted(fields: dict[str, Any], num_layers: int) -> None:
    assert shape_of(BASE | fields).num_layers == num_layers


def test_sizes_are_found_under_their_many_names() -> None:
    assert shape_of(BASE).inner == 32
    assert shape_of(BASE | {"moe_intermediate_size": [16, 16]}).inner == 16
    assert shape_of({"text_config": BASE, "model_type": "vision"}).num_experts == 4
    dbrx = {"d_model": 8, "n_layers": 3, "model_type": "dbrx", "torch_dtype": "float32",
            "ffn_config": {"ffn_hidden_size": 6, "moe_num_experts": 4, "moe_top_k": 3}}  # fmt: skip
    assert shape_of(dbrx) == ExpertShape(
        model_type="dbrx", num_layers=3, num_experts=4, top_k=3, hidden=8, inner=6,
        dtype="float32", weight_dtype="float32",
    )  # fmt: skip
    assert shape_of(dbrx).expert_bytes == 3 * 8 * 6 * 4
    fp4 = shape_of(BASE | {"quantization_config": {"quant_method": "mxfp4"}})
    assert (fp4.row_bytes, fp4.expert_bytes) == (2, 3 * 8 * 32 * 17 // 32)
    assert shape_of(BASE | {"mlp_hidden_act": "relu2"}).num_weights == 2 * 8 * 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "has none of num_local_experts"),
        ({"num_experts": 0}, "num_experts 0"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok '2'"),
        ({"moe_intermediate_size": [16, 32]}, r"moe_intermediate_size \[16, 32\]"),
        ({"zero_expert_num": 3}, "zero_expert_num 3"),
        ({"first_k_dense_replace": 12}, "no layer has routed experts"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace '1'"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq"),
        ({"torch_dtype": "int8"}, "'int8'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
    ],
)
def test_what_is_not_understood_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(BASE | fields)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the configs of real models are not here")
def test_experts_of_real_models_are_most_of_their_parameters() -> None:
    """The parameters of whole models were counted otherwise."""
    refused, known = [], 0
    for entry in json.loads((CONFIGS / "INDEX.json").read_text()):
        fields = json.loads((CONFIGS / entry["file"]).read_text())
        try:
            shape = shape_of(fields)
        except ConfigError as error:
            refused.append((fields["model_type"], str(error)))
            continue
        known += 1
        experts = shape.num_weights * shape.num_layers * shape.num_experts
        share = experts / entry.get("meta_parameters", experts / 0.9)
        assert 0.75 < share < 0.99, entry["file"]
    assert known >= 46
    assert [name for name, _ in refused] == ["longcat_flash"]
    assert "zero_expert_num" in refused[0][1]
