"""`moe-serve convert`: what it writes loads everywhere."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_serve import LLM, SamplingParams
from moe_serve.checkpoint import Checkpoint, TensorInfo
from moe_serve.cli import main
from moe_serve.convert.conversion import prepare
from moe_serve.convert.shards import plan_shards
from moe_serve.model_folder import open_model_folder
from moe_serve.parallel.shard import Span
from tests.cli.converted import check_sums, names
from tests.conftest import FAMILIES, save_random_family

PROMPT = [3, 1, 4, 1, 5]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """By transformers, which finds nothing missing, left over or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def greedy(model: Any) -> list[int]:
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=7, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def assert_equal_states(found: Any, expected: Mapping[str, torch.Tensor]) -> None:
    state = found.state_dict()
    assert state.keys() == expected.keys()
    for name in state:
        assert torch.equal(state[name], expected[name]), name


def edit_config(folder: Path, **changes: object) -> None:
    """`name=None` drops the field."""
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )


class FakeSource:
    """Tensors made when they are read, the last asked for first; notes what of them lives on."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self.tensors = tensors
        self.live_bytes = 0
        self.peak_live_bytes = 0
        self.peak_anonymous_bytes = 0

    def read(
        self, parts: Mapping[str, Sequence[tuple[Span, ...]]]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        for name in reversed(parts):
            for index in reversed(range(len(parts[name]))):
                yield name, index, self._make(parts[name][index])

    def _make(self, part: tuple[Span, ...]) -> torch.Tensor:
        tensor = torch.full([span.size for span in part], 0.5)
        self.live_bytes += tensor.nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        self.peak_anonymous_bytes = max(self.peak_anonymous_bytes, anonymous_bytes())
        weakref.finalize(tensor, self._forget, tensor.nbytes)
        return tensor

    def _forget(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_saved_as_they_are_trained_come_out_as_the_hub_has_them(
    family: str, random_family: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = load(random_family(family)).state_dict()
    source, out = tmp_path / "trained", tmp_path / "out"
    source.mkdir()
    for file in random_family(family).glob("*.json*"):
        (source / file.name).write_bytes(file.read_bytes())
    save_file(expected, source / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in expected)
    assert main(["convert", str(source), str(out)]) == 0
    usual = Checkpoint.open(random_family(family)).tensors
    found = Checkpoint.open(out).tensors
    assert {n: (i.dtype, i.shape) for n, i in found.items()} == {
        n: (i.dtype, i.shape) for n, i in usual.items()
    }
    assert_equal_states(load(out), expected)


def test_the_new_folder_says_what_the_old_one_did(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(random_model), str(out), "--max-shard-size", "100KB"]) == 0
    reference = load(random_model)
    assert_equal_states(load(out), reference.state_dict())
    with LLM(str(out), device="cpu", dtype="float32", num_threads=1) as llm:
        params = SamplingParams(max_tokens=7, temperature=0)
        (result,) = llm.generate([PROMPT], params)
        # The tokenizer and the chat template came along.
        llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1))
    assert result.outputs[0].token_ids == greedy(reference)
    check_sums(out)
    # Just an account, on standard output; no bar where no terminal is.
    account, errors = capsys.readouterr()
    num_shards = len(list(out.glob("*.safetensors")))
    assert num_shards > 2
    sizes = [info.num_bytes for info in Checkpoint.open(out).tensors.values()]
    assert (
        f"{out}: {len(sizes)} tensors, {sum(sizes):,} bytes in float32, {num_shards} shards"
    ) in account
    assert account.endswith("none missing, none left over\n")
    assert errors == ""


@pytest.mark.parametrize("size", ["1", "32KiB", "5GB"])
def test_shards_of_awkward_sizes(size: str, random_model: Path, tmp_path: Path) -> None:
    """Each tensor alone; just what one of the larger ones takes; all in one."""
    out = tmp_path / "out"
    assert main(["convert", str(random_model), str(out), "--max-shard-size", size]) == 0
    expected = load_file(random_model / "model.safetensors")
    files = sorted(out.glob("*.safetensors"))
    shards = {file.name: load_file(file) for file in files}
    assert sum(map(len, shards.values())) == len(expected)
    for shard in shards.values():
        for name, tensor in shard.items():
            assert torch.equal(tensor, expected[name])
    index = out / "model.safetensors.index.json"
    if size == "5GB":
        assert list(shards) == ["model.safetensors"] and not index.exists()
    else:
        fields = json.loads(index.read_text())
        total = sum(tensor.nbytes for tensor in expected.values())
        assert fields["metadata"] == {"total_size": total}
        count = len(files)
        wanted = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        assert list(shards) == wanted
        assert fields["weight_map"] == {n: file for file in shards for n in shards[file]}
    if size == "1":
        assert len(files) == len(expected)
    # Tensors begin where their elements may lie.
    assert all(info.start % 8 == 0 for info in Checkpoint.open(out).tensors.values())
    check_sums(out)


def test_a_file_ends_before_it_would_be_too_large() -> None:
    shapes = {name: (size,) for name, size in zip("abcdefg", (4, 4, 4, 9, 1, 0, 7), strict=True)}
    shards = plan_shards(shapes, dtype="U8", itemsize=1, max_bytes=8)
    assert [list(shard.places) for shard in shards] == [
        ["a", "b"], ["c"], ["d"], ["e", "f", "g"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_another_dtype_is_that_of_the_weights_and_of_the_config(
    name: str, random_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(random_model), str(out), "--dtype", name]) == 0
    dtype = getattr(torch, name)
    expected = load_file(random_model / "model.safetensors")
    for tensor_name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, expected[tensor_name].to(dtype))
    assert json.loads((out / "config.json").read_text())["dtype"] == name
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype is dtype


def test_auto_is_the_dtype_of_the_config_or_else_of_the_tensors(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    assert main(["convert", str(random_model), str(source), "--dtype", "float16"]) == 0
    edit_config(source, dtype=None)
    assert main(["convert", str(source), str(tmp_path / "a")]) == 0
    edit_config(source, torch_dtype="bfloat16")
    assert main(["convert", str(source), str(tmp_path / "b")]) == 0
    edit_config(source, torch_dtype="float64")
    capsys.readouterr()
    assert main(["convert", str(source), str(tmp_path / "c")]) == 2
    assert "dtype float64 is none to convert to; give --dtype" in capsys.readouterr().err
    # Experts in a lower dtype than the rest, as DeepSpeed saves its MoE layers.
    edit_config(source, torch_dtype=None)
    tensors = load_file(source / "model.safetensors")
    mixed = {n: t.bfloat16() if ".experts." in n else t.float() for n, t in tensors.items()}
    save_file(mixed, source / "model.safetensors")
    assert main(["convert", str(source), str(tmp_path / "c")]) == 0
    found = {}
    for name in "abc":
        fields = json.loads((tmp_path / name / "config.json").read_text())
        weights = Checkpoint.open(tmp_path / name).tensors.values()
        found[name] = fields.get("dtype"), fields.get("torch_dtype"), {i.dtype for i in weights}
    assert found == {
        "a": ("float16", None, {"F16"}),
        "b": (None, "bfloat16", {"BF16"}),
        "c": ("float32", None, {"F32"}),
    }


def test_a_value_that_float16_cannot_hold_is_an_error_that_names_it(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    assert main(["convert", str(random_model), str(source)]) == 0
    tensors = load_file(source / "model.safetensors")
    # What is infinite or nothing to begin with is no loss.
    tensors["model.norm.weight"][:3] = torch.tensor([torch.inf, torch.nan, -65504])
    save_file(tensors, source / "model.safetensors")
    assert main(["convert", str(source), str(tmp_path / "a"), "--dtype", "float16"]) == 0
    tensors["model.norm.weight"][7] = -70000
    save_file(tensors, source / "model.safetensors")
    capsys.readouterr()
    assert main(["convert", str(source), str(tmp_path / "b"), "--dtype", "float16"]) == 2
    error = capsys.readouterr().err
    assert "model.norm.weight holds -70000, beyond its largest value 65504" in error
    assert names(tmp_path) == ["a", "source"]


def test_a_head_tied_to_the_embedding_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_random_family(source, "olmoe", tie_word_embeddings=True)
    expected = load(source).state_dict()
    # As a training run has it: both names, one tensor.
    save_file({n: t.clone() for n, t in expected.items()}, source / "model.safetensors")
    assert main(["convert", str(source), str(out)]) == 0
    assert "lm_head.weight" not in Checkpoint.open(out).tensors
    assert_equal_states(load(out), expected)
    account, errors = capsys.readouterr()
    assert "not needed and left out: lm_head.weight" in account
    assert "has no tokenizer.json" in errors


def test_what_belongs_to_a_model_comes_along_and_nothing_else(
    random_model: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    assert main(["convert", str(random_model), str(source)]) == 0
    kept = ["LICENSE", "generation_config.json", "merges.txt", "vocab.json",
            "additional_chat_templates/tool_use.jinja"]  # fmt: skip
    (source / "additional_chat_templates").mkdir()
    for name in [*kept, "trainer_state.json", "rng_state.pth", "zero_to_fp32.py"]:
        (source / name).write_text("{}")
    (source / "tokenizer_things").mkdir()
    (source / "generation_config.json").unlink()
    (source / "generation_config.json").symlink_to(source / "vocab.json")
    assert main(["convert", str(source), str(out)]) == 0
    found = [path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()]
    own = ["SHA256SUMS", "config.json", "model.safetensors"]
    tokenizer = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert sorted(found) == sorted([*kept, *own, *tokenizer])
    assert not any(path.is_symlink() for path in out.rglob("*"))
    check_sums(out)


def test_memory_does_not_grow_with_the_model_or_the_shards(tmp_path: Path) -> None:
    """100 MB in one file, from tensors of 1 MB; and sums are right in whatever order they come."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=512, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_experts=17, num_experts_per_tok=2,
        moe_intermediate_size=512, architectures=["Qwen3MoeForCausalLM"], dtype="float32",
    )  # fmt: skip
    folder = tmp_path / "source"
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = transformers.Qwen3MoeForCausalLM(config).state_dict()
    infos = {
        name: TensorInfo(file=folder / "none", dtype="F32", shape=tuple(tensor.shape), start=None)
        for name, tensor in state.items()
    }
    source = FakeSource(folder, infos)
    model = open_model_folder(str(folder))
    conversion = prepare(model, source, tmp_path / "out", "auto", 2**40)
    assert (len(conversion.shards), conversion.tensor_bytes > 100e6) == (1, True)
    before = anonymous_bytes()
    written: list[int] = []
    conversion.write(written.append)
    assert sum(written) == conversion.tensor_bytes
    # The next tensor is made while the last one is still in the hands of who asked for it.
    assert source.peak_live_bytes <= 2 * 512 * 512 * 4
    assert source.peak_anonymous_bytes - before < 24e6
    check_sums(tmp_path / "out")
    first = load_file(tmp_path / "out" / "model.safetensors")
    assert all((tensor == 0.5).all() for tensor in first.values())
