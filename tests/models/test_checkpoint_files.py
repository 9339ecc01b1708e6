"""Files that are missing, truncated or corrupt: one error that names them, before any memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_serve import loader
from moe_serve.checkpoint import INDEX_NAME
from moe_serve.errors import CheckpointError
from moe_serve.model_folder import read_config
from moe_serve.models.decoder import Decoder


@pytest.fixture
def sharded(make_tiny):
    """A model in several shards with an index."""
    tiny = make_tiny("qwen3_moe", max_shard_size="200KB")
    assert len(shards(tiny)) >= 3
    return tiny


@pytest.fixture
def refuses(monkeypatch):
    """Call it: the model is refused with that message, and its memory was never taken."""

    def check(tiny, message: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(loader, "Decoder", MetaOnlyDecoder)
            with pytest.raises(CheckpointError, match=message):
                tiny.decoder()

    return check


class MetaOnlyDecoder(Decoder):
    def __init__(self, spec, dtype, device, ranks) -> None:
        assert device.type == "meta", "memory was taken before all was checked"
        super().__init__(spec, dtype, device, ranks)


def shards(tiny) -> list[Path]:
    return sorted(tiny.folder.glob("*.safetensors"))


def edit_header(file: Path, edit) -> None:
    """Rewrite the JSON header; data offsets count from its end, so they still hold."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = edit(data[8 : 8 + length])
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def test_shards_with_index_equal_one_file(make_tiny, sharded) -> None:
    whole = make_tiny("qwen3_moe")
    assert len(shards(whole)) == 1
    prompt = whole.prompt(33)
    assert torch.equal(sharded.runner().score(prompt), whole.runner().score(prompt))


def test_complete_shards_load_without_their_index(sharded) -> None:
    expected = sharded.runner().score(range(7))
    (sharded.folder / INDEX_NAME).unlink()
    assert torch.equal(sharded.runner().score(range(7)), expected)


@pytest.mark.parametrize("has_index", [True, False])
def test_missing_shards_are_all_named(sharded, refuses, has_index: bool) -> None:
    if not has_index:
        (sharded.folder / INDEX_NAME).unlink()
    gone = shards(sharded)[1:3]
    for file in gone:
        file.unlink()
    refuses(sharded, f"2 (files|shards) not there: {gone[0].name}, {gone[1].name}")


def test_an_index_that_names_a_wrong_file_is_refused(sharded, refuses) -> None:
    index = sharded.folder / INDEX_NAME
    index.write_text(index.read_text().replace(shards(sharded)[0].name, "other.safetensors"))
    refuses(sharded, "1 file not there: other.safetensors")


def test_an_index_that_places_a_tensor_in_the_wrong_file_is_refused(sharded, refuses) -> None:
    index = sharded.folder / INDEX_NAME
    fields = json.loads(index.read_text())
    wrong = next(
        file.name
        for file in shards(sharded)
        if file.name != fields["weight_map"]["model.norm.weight"]
    )
    fields["weight_map"]["model.norm.weight"] = wrong
    index.write_text(json.dumps(fields))
    refuses(sharded, f"places tensor model.norm.weight in {wrong}, which lacks it")


def test_an_index_that_leaves_the_folder_is_refused(sharded, refuses) -> None:
    index = sharded.folder / INDEX_NAME
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    refuses(sharded, "outside the folder")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(sharded, refuses, text: str) -> None:
    (sharded.folder / INDEX_NAME).write_text(text)
    refuses(sharded, INDEX_NAME)


def test_a_folder_without_weights_is_refused(sharded, refuses) -> None:
    for file in [*shards(sharded), sharded.folder / INDEX_NAME]:
        file.unlink()
    refuses(sharded, r"no \*\.safetensors file")


def test_a_truncated_shard_is_named_with_both_sizes(sharded, refuses) -> None:
    file = shards(sharded)[1]
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    refuses(sharded, f"{file.name}: its header declares {size} bytes, the file has {size - 100}")


def test_a_shard_with_more_than_its_header_says_is_refused(sharded, refuses) -> None:
    file = shards(sharded)[1]
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"x" * 100)
    refuses(sharded, f"{file.name}: its header declares {size} bytes, the file has {size + 100}")


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_shard_cut_inside_its_header_is_refused(sharded, refuses, size: int) -> None:
    file = shards(sharded)[1]
    file.write_bytes(file.read_bytes()[:size])
    refuses(sharded, f"{file.name}: truncated.* needs .* bytes, the file has {size}")


def test_an_unknown_dtype_is_refused(sharded, refuses) -> None:
    file = shards(sharded)[1]
    edit_header(file, lambda header: header.replace(b'"F32"', b'"Q32"', 1))
    refuses(sharded, f"{file.name}: tensor .* has the unknown dtype 'Q32'")


def test_a_dtype_that_does_not_fill_its_bytes_is_refused(sharded, refuses) -> None:
    file = shards(sharded)[1]
    edit_header(file, lambda header: header.replace(b'"F32"', b'"F16"', 1))
    refuses(sharded, f"{file.name}: tensor .* with dtype F16 and shape .* needs .* bytes")


def test_a_header_that_is_no_json_is_refused(sharded, refuses) -> None:
    file = shards(sharded)[1]
    edit_header(file, lambda header: b"{" * len(header))
    refuses(sharded, f"{file.name}: its header is corrupt")


def test_overlapping_tensors_are_refused(sharded, refuses) -> None:
    file = shards(sharded)[1]

    def overlap(header: bytes) -> bytes:
        fields = json.loads(header)
        names = [name for name in fields if name.endswith("gate_proj.weight")]
        fields[names[0]]["data_offsets"] = fields[names[1]]["data_offsets"]
        return json.dumps(fields).encode()

    edit_header(file, overlap)
    refuses(sharded, file.name)


def test_integer_weights_are_refused(make_tiny, refuses) -> None:
    tiny = make_tiny("qwen3_moe")
    name = "model.norm.weight"
    tiny.edit_tensors(lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refuses(tiny, f"tensor {name} has dtype I8")


def test_a_tensor_in_two_files_without_index_is_refused(make_tiny, refuses) -> None:
    tiny = make_tiny("qwen3_moe")
    (tiny.folder / "model-copy.safetensors").write_bytes(shards(tiny)[0].read_bytes())
    refuses(tiny, "is in model-copy.safetensors and in model.safetensors")


def test_a_checkpoint_in_another_format_is_refused(make_tiny, refuses) -> None:
    tiny = make_tiny("qwen3_moe")
    shards(tiny)[0].rename(tiny.folder / "pytorch_model.bin")
    refuses(tiny, r"no \*\.safetensors file")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_shows_on_a_terminal_only(make_tiny, monkeypatch, capsys, is_terminal) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    tiny = make_tiny("mixtral")
    capsys.readouterr()
    loader.load_model(
        tiny.folder,
        read_config(tiny.folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        show_progress=True,
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert ("Loading weights" in err) == is_terminal
