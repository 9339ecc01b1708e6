"""Which tensors a checkpoint may hold, and that all of them land where they belong."""

from __future__ import annotations

import pytest
import torch

from moe_serve.checkpoint import Checkpoint
from moe_serve.errors import CheckpointError
from moe_serve.loader import check_coverage, fill, make_plan, parameter_shapes
from moe_serve.model_folder import read_config
from moe_serve.models.decoder import Decoder
from moe_serve.models.registry import find_family

CPU = torch.device("cpu")
PROMPT = list(range(3, 30))
PARTS = {"mixtral": ("w1", "w3", "w2")}
BLOCK = {"mixtral": "block_sparse_moe"}


def stack_experts(tensors, family: str, layer: int, *, transposed=False, block=None) -> None:
    """Rewrite one layer's experts as transformers holds them in memory."""
    gate, up, down = PARTS.get(family, ("gate_proj", "up_proj", "down_proj"))
    usual = BLOCK.get(family, "mlp")
    old = f"model.layers.{layer}.{usual}.experts."
    new = f"model.layers.{layer}.{block or usual}.experts."
    experts = range(sum(name.startswith(old) for name in tensors) // 3)

    def take(part: str) -> torch.Tensor:
        return torch.stack([tensors.pop(f"{old}{e}.{part}.weight") for e in experts])

    gate_up = torch.cat((take(gate), take(up)), dim=1)
    tensors[f"{new}gate_up_proj"] = gate_up.mT if transposed else gate_up
    down = take(down)
    tensors[f"{new}down_proj"] = down.mT if transposed else down


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("layers", [[0, 1], [1]], ids=["all", "mixed"])
def test_stacked_experts_equal_single_ones(make_tiny, family: str, layers: list[int]) -> None:
    tiny = make_tiny(family)
    expected = tiny.runner().score(PROMPT)

    def edit(tensors) -> None:
        for layer in layers:
            stack_experts(tensors, family, layer)

    tiny.edit_tensors(edit)
    assert torch.equal(tiny.runner().score(PROMPT), expected)


# (inner 32, hidden 64): gate_up is square; (64, 64): down is; the other one tells the direction.
@pytest.mark.parametrize("inner_size", [24, 32, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_transposed_stacks_are_recognised(make_tiny, transposed: bool, inner_size: int) -> None:
    tiny = make_tiny("qwen3_moe", moe_intermediate_size=inner_size)
    expected = tiny.runner().score(PROMPT)
    tiny.edit_tensors(lambda tensors: stack_experts(tensors, "", 1, transposed=transposed))
    assert torch.equal(tiny.runner().score(PROMPT), expected)


def test_one_matrix_may_be_stacked_and_the_other_not(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")
    expected = tiny.runner().score(PROMPT)

    def edit(tensors) -> None:
        singles = {name: tensor for name, tensor in tensors.items() if "down_proj" in name}
        stack_experts(tensors, "", 0)
        del tensors["model.layers.0.mlp.experts.down_proj"]
        tensors.update(singles)

    tiny.edit_tensors(edit)
    assert torch.equal(tiny.runner().score(PROMPT), expected)


def test_mixtral_blocks_may_go_by_transformers_new_name(make_tiny) -> None:
    tiny = make_tiny("mixtral")
    expected = tiny.runner().score(PROMPT)

    def edit(tensors) -> None:
        for layer in (0, 1):
            stack_experts(tensors, "mixtral", layer, block="mlp")
            old = f"model.layers.{layer}.block_sparse_moe.gate.weight"
            tensors[f"model.layers.{layer}.mlp.gate.weight"] = tensors.pop(old)

    tiny.edit_tensors(edit)
    assert torch.equal(tiny.runner().score(PROMPT), expected)


def test_a_missing_expert_is_named(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")
    names = [f"model.layers.1.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up", "down")]
    tiny.edit_tensors(lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(CheckpointError, match="lacks 3 of the model's tensors") as caught:
        tiny.decoder()
    assert all(name in str(caught.value) for name in names)


def test_many_missing_tensors_are_counted_and_some_named(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")

    def drop_experts(tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    tiny.edit_tensors(drop_experts)
    with pytest.raises(CheckpointError, match="lacks 48 of .* and 43 more"):
        tiny.decoder()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.8.up_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "something.else",
    ],
)
def test_an_unknown_tensor_is_refused_by_name(make_tiny, name: str) -> None:
    tiny = make_tiny("qwen3_moe")
    tiny.edit_tensors(lambda tensors: tensors.update({name: torch.zeros(32, 64)}))
    with pytest.raises(CheckpointError, match=f"Qwen3MoeForCausalLM has no place for: {name}"):
        tiny.decoder()


def test_experts_both_stacked_and_single_are_refused(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")

    def edit(tensors) -> None:
        singles = dict(tensors)
        stack_experts(tensors, "", 0)
        tensors.update(singles)

    tiny.edit_tensors(edit)
    with pytest.raises(CheckpointError, match="has 24 tensors that"):
        tiny.decoder()


def test_rotary_frequencies_of_older_exports_are_harmless(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")
    expected = tiny.runner().score(PROMPT)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tiny.edit_tensors(lambda tensors: tensors.update({name: torch.ones(16)}))
    assert torch.equal(tiny.runner().score(PROMPT), expected)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.1.mlp.experts.3.gate_proj.weight", (64, 32), [32, 64]),
        ("model.layers.1.mlp.experts.3.down_proj.weight", (32, 64), [64, 32]),
        ("model.layers.0.self_attn.k_proj.weight", (128, 64), [64, 64]),
        ("model.layers.0.self_attn.q_norm.weight", (128,), [32]),
        ("model.embed_tokens.weight", (321, 64), [320, 64]),
        ("model.norm.weight", (1, 64), [64]),
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(make_tiny, name, shape, expected) -> None:
    tiny = make_tiny("qwen3_moe")
    tiny.edit_tensors(lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError) as caught:
        tiny.decoder()
    assert f"tensor {name} must have shape {expected}" in str(caught.value)
    assert f"found {list(shape)}" in str(caught.value)


def test_a_stack_of_wrong_shape_is_refused(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")

    def edit(tensors) -> None:
        stack_experts(tensors, "", 0)
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name][:7]

    tiny.edit_tensors(edit)
    with pytest.raises(CheckpointError, match=r"down_proj must have shape \[8, 64, 32\]"):
        tiny.decoder()


@pytest.mark.parametrize("has_head", [True, False])
def test_tied_embeddings_serve_as_head_whatever_the_file_holds(make_tiny, has_head: bool) -> None:
    tiny = make_tiny("qwen3_moe", tie_word_embeddings=True)
    expected = tiny.assert_same_scores()
    if has_head:
        stray = torch.randn(320, 64)
        tiny.edit_tensors(lambda tensors: tensors.update({"lm_head.weight": stray}))
    assert torch.equal(tiny.runner().score(tiny.prompt(33)), expected)
    assert "lm_head.weight" not in plan_of(tiny)


@pytest.mark.parametrize("tie", [False, ...])
def test_untied_embeddings_need_their_head(make_tiny, tie) -> None:
    tiny = make_tiny("qwen3_moe")
    tiny.edit_config(tie_word_embeddings=tie)
    tiny.assert_same_scores()
    tiny.edit_tensors(lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        tiny.decoder()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_no_parameter_stays_unset(make_tiny, family: str, dtype: torch.dtype) -> None:
    tiny = make_tiny(family, num_hidden_layers=3)
    tiny.edit_tensors(lambda tensors: stack_experts(tensors, family, 1))
    checkpoint = Checkpoint.open(tiny.folder)
    model = Decoder(spec_of(tiny), dtype, CPU)
    for weight in model.parameters():
        weight.fill_(float("nan"))
    plan = plan_of(tiny)
    assert sorted(plan) == sorted(checkpoint.tensors)
    fill(dict(model.named_parameters()), checkpoint, plan)
    assert not any(weight.isnan().any() for weight in model.parameters())


def test_a_plan_with_a_hole_or_an_overlap_does_not_pass(make_tiny) -> None:
    tiny = make_tiny("qwen3_moe")
    shapes = parameter_shapes(Decoder(spec_of(tiny), torch.float32, torch.device("meta")))
    name, other = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    plan = plan_of(tiny)
    hole = {key: slot for key, slot in plan.items() if key != name}
    with pytest.raises(AssertionError, match=r"layers\.0\.attention\.qkv\.weight_ND: rows 0 to"):
        check_coverage(hole, shapes)
    with pytest.raises(AssertionError, match="rows"):
        check_coverage({**plan, "twice": plan[other]}, shapes)


def test_each_tensor_is_read_once(make_tiny) -> None:
    tiny = make_tiny("olmoe", max_shard_size="100KB")
    plan = plan_of(tiny)
    parts = {name: [slot.part for slot in source.slots] for name, source in plan.items()}
    names = [name for name, _, _ in Checkpoint.open(tiny.folder).read(parts)]
    assert len(names) == len(set(names)) == len(plan)


def spec_of(tiny):
    config = read_config(tiny.folder)
    return find_family(config.architectures).spec(config)


def plan_of(tiny):
    spec = spec_of(tiny)
    family = find_family([spec.architecture])
    return make_plan(spec, family.names, Checkpoint.open(tiny.folder))
