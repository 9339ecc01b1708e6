"""What is read from config.json and generation_config.json, and what is refused."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from moe_serve.errors import CheckpointError
from moe_serve.kv_pool import block_bytes
from moe_serve.loader import pick_dtype
from moe_serve.model_folder import eos_token_ids, open_model_folder, read_config
from moe_serve.models.shard import WHOLE_MODEL

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_explicit_head_dim_wins(make_tiny, family: str) -> None:
    tiny = make_tiny(family, head_dim=32)
    spec = tiny.decoder().spec
    assert [layer.attention.head_dim for layer in spec.layers] == [32, 32]
    assert block_bytes(spec, WHOLE_MODEL, 16, torch.float32) == 16 * 2 * 2 * 2 * 32 * 4
    tiny.assert_same_scores()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_head_dim_null_and_absent_mean_hidden_size_by_heads(make_tiny, family: str) -> None:
    tiny = make_tiny(family, head_dim=16)
    expected = tiny.assert_same_scores()
    for head_dim in (None, ...):
        tiny.edit_config(head_dim=head_dim)
        model = tiny.runner()
        assert model.model.spec.layers[0].attention.head_dim == 16
        assert torch.equal(model.score(tiny.prompt(33)), expected)


def test_an_unknown_architecture_is_refused_with_the_known_ones(make_tiny) -> None:
    tiny = make_tiny("mixtral")
    tiny.edit_config(architectures=["ArcticForCausalLM"], model_type="arctic")
    with pytest.raises(CheckpointError, match="ArcticForCausalLM.*known: MixtralForCausalLM"):
        tiny.decoder()


@pytest.mark.parametrize("architectures", [..., None, [], ["MixtralForCausalLM", "Other"]])
def test_an_unclear_architecture_is_refused(make_tiny, architectures) -> None:
    tiny = make_tiny("mixtral")
    tiny.edit_config(architectures=architectures)
    with pytest.raises(CheckpointError, match="architectures"):
        tiny.decoder()


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"architectures": ["MixtralForC'])
def test_a_broken_config_is_refused_by_name(make_tiny, text: str) -> None:
    tiny = make_tiny("mixtral")
    (tiny.folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"mixtral-0/config\.json"):
        tiny.decoder()


def test_a_folder_without_config_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 .* num_key_value_heads 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 .* experts, 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        ({"num_local_experts": 0}, "num_experts of MoESpec is 0"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"vocab_size": -1}, "vocab_size of DecoderSpec is -1"),
        ({"head_dim": 3}, "head_dim 3 must be even"),
        ({"hidden_size": "wide"}, r"config\.json"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(make_tiny, fields, message: str) -> None:
    tiny = make_tiny("mixtral")
    tiny.edit_config(**fields)
    with pytest.raises(CheckpointError, match=message):
        tiny.decoder()


@pytest.mark.parametrize("method", ["fp8", "gptq", "bitsandbytes"])
def test_a_quantised_checkpoint_is_refused(make_tiny, method: str) -> None:
    tiny = make_tiny("mixtral")
    tiny.edit_config(quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointError, match=f"quant_method '{method}'"):
        tiny.decoder()


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "in_tokenizer", "expected"),
    [
        (5, [5, 6], 7, {5, 6, 7}),
        (5, 6, None, {5, 6}),
        ([5, 6], ..., 6, {5, 6}),
        (None, [8], None, {8}),
        (None, None, None, set()),
        (0, ..., None, {0}),
        (319, [320, 1], 4000, {319, 1}),
    ],
)
def test_every_end_of_text_id_counts(
    make_tiny, in_config, in_generation_config, in_tokenizer, expected
) -> None:
    tiny = make_tiny("mixtral")
    tiny.edit_config(eos_token_id=in_config)
    write_generation_config(tiny, in_generation_config)
    config = read_config(tiny.folder)
    assert eos_token_ids(tiny.folder, config, in_tokenizer) == expected


def test_an_end_of_text_id_outside_the_vocabulary_is_dropped_with_a_warning(
    make_tiny, caplog
) -> None:
    tiny = make_tiny("mixtral")
    write_generation_config(tiny, [3, 320, -1])
    with caplog.at_level(logging.WARNING):
        assert eos_token_ids(tiny.folder, read_config(tiny.folder)) == {3}
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert "ignoring eos_token_id 320 of generation_config.json" in messages
    assert "ignoring eos_token_id -1" in messages
    assert "the vocabulary has 320 entries" in messages


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, {"id": 1}])
def test_an_end_of_text_that_is_no_id_is_refused(make_tiny, value) -> None:
    tiny = make_tiny("mixtral")
    write_generation_config(tiny, value)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        eos_token_ids(tiny.folder, read_config(tiny.folder))


def test_an_open_folder_knows_the_tokenizers_own_end(make_tiny) -> None:
    tiny = make_tiny("qwen2_moe", eos_token_id=9)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>"
    ).save_pretrained(tiny.folder)
    folder = open_model_folder(str(tiny.folder))
    assert folder.eos_token_ids == {9, 2}
    assert folder.architecture == "Qwen2MoeForCausalLM"
    assert folder.spec.vocab_size == 320


@pytest.mark.parametrize(
    ("name", "in_config", "expected"),
    [
        ("auto", "float32", torch.bfloat16),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.float16),
        ("auto", None, torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
        ("bfloat16", "float16", torch.bfloat16),
    ],
)
def test_dtype_is_the_wanted_one_or_the_checkpoints(make_tiny, name, in_config, expected) -> None:
    tiny = make_tiny("mixtral")
    tiny.edit_config(dtype=in_config)
    assert pick_dtype(read_config(tiny.folder), name, CPU) == expected


def write_generation_config(tiny, eos) -> None:
    file = tiny.folder / "generation_config.json"
    if eos is ...:
        file.unlink()
    else:
        file.write_text(json.dumps({"eos_token_id": eos}))
