"""Rotary embedding: every way to write it down, and every kind of scaling."""

from __future__ import annotations

import pytest
import torch

from moe_serve.errors import CheckpointError
from moe_serve.layers.rotary import RotaryTable
from moe_serve.models.spec import RopeSpec

NUM_TOKENS = 201
LINEAR = {"rope_type": "linear", "factor": 2.0}
THETA_STYLES = [
    {"rope_parameters": ..., "rope_theta": 1e6},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 1e6}},
    {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": None},
]
LINEAR_STYLES = [
    {"rope_parameters": {**LINEAR, "rope_theta": 1e4}},
    {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": LINEAR},
    {
        "rope_parameters": ...,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    {"rope_parameters": ..., "rope_scaling": LINEAR},
]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED = {
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-given-temperature": {**YARN, "attention_factor": 1.3},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
}


@pytest.mark.parametrize("styles", [THETA_STYLES, LINEAR_STYLES], ids=["theta", "linear"])
def test_all_styles_that_mean_the_same_are_equal(make_tiny, styles) -> None:
    tiny = make_tiny("qwen3_moe")
    before = tiny.runner().score(tiny.prompt(NUM_TOKENS))
    found = []
    for style in styles:
        tiny.edit_config(rope_scaling=..., rope_theta=...)
        tiny.edit_config(**style)
        found.append(tiny.assert_same_scores(NUM_TOKENS))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert (before - found[0]).abs().max() > 1e-2


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_scaled_kinds_equal_transformers(make_tiny, family: str, name: str) -> None:
    make_tiny(family, rope_parameters=SCALED[name]).assert_same_scores(NUM_TOKENS)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "spiral"])
def test_an_unknown_kind_is_refused(make_tiny, kind: str) -> None:
    tiny = make_tiny("qwen3_moe")
    fields = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        fields |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    tiny.edit_config(rope_parameters=fields)
    with pytest.raises(CheckpointError, match=f"rope_type '{kind}' is not supported"):
        tiny.decoder()


@pytest.mark.parametrize("factor", [None, 0, "two"])
def test_a_scaling_without_its_factor_is_refused(make_tiny, factor) -> None:
    tiny = make_tiny("qwen3_moe")
    tiny.edit_config(rope_parameters={"rope_type": "linear", "factor": factor})
    with pytest.raises(CheckpointError, match="factor"):
        tiny.decoder()


def test_partial_rotation_is_refused_rather_than_ignored(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")
    tiny.edit_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    with pytest.raises(CheckpointError, match="partial_rotary_factor 0.5"):
        tiny.decoder()


def test_a_table_grows_without_changing_its_rows() -> None:
    spec = RopeSpec(theta=1e4, rotary_dim=6)
    small = RotaryTable(spec, 5000, torch.device("cpu"))
    positions = torch.tensor([0, 1, 7, 511])
    before = small.lookup(positions, 512)
    small.lookup(torch.tensor([4999]), 5000)
    after = small.lookup(positions, 512)
    assert torch.equal(before.cos_Tr, after.cos_Tr)
    assert torch.equal(before.sin_Tr, after.sin_Tr)
