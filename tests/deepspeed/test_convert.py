"""What `moe-serve convert` makes of trained checkpoints: transformers loads them, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from moe_serve.checkpoint import Checkpoint
from moe_serve.cli import main
from tests.deepspeed.checks import stacked
from tests.deepspeed.conftest import Trainings

RUNS = [
    "mixtral-zero0", "mixtral-zero1", "mixtral-zero2", "mixtral-zero3", "qwen3_moe-zero1",
    "qwen3_moe-zero2", "qwen3_moe-zero3", "mixtral-moe", "qwen3_moe-moe-zero2",
]  # fmt: skip
pytestmark = [pytest.mark.dist]


def assert_loads(folder: Path, truth: dict[str, Tensor], dtype: torch.dtype) -> None:
    """By transformers, which finds nothing missing, left over or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(info.values()), info
    expected = stacked(truth)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    assert state.keys() == expected.keys()
    for name in state:
        assert torch.equal(state[name], expected[name].to(dtype)), name


@pytest.mark.parametrize("run", RUNS)
def test_a_training_comes_out_as_a_model_of_the_hub(
    run: str, trainings: Trainings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["convert", str(trainings.folder(run)), str(out), "--dtype", "float32"]
    assert main([*argv, "--max-shard-size", "20KB"]) == 0
    assert_loads(out, trainings.truth(run), torch.float32)
    assert len(list(out.glob("model-*.safetensors"))) > 3
    found = Checkpoint.open(out).tensors
    assert any(".experts.3." in name for name in found)
    is_tied = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in found) is not is_tied
    assert capsys.readouterr().out.endswith("none missing, none left over\n")


def test_deepspeeds_files_come_before_safetensors_and_may_be_of_another_step(
    trainings: Trainings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder as Hugging Face's trainer leaves it: both are there, and more than one step."""
    source = tmp_path / "source"
    shutil.copytree(trainings.folder("qwen3_moe-zero2"), source)
    (step,) = source.glob("global_step*")
    step.rename(source / "global_step7")
    (source / "model.safetensors").write_bytes(b"no such file is read")
    latest = source / "latest"
    latest.write_text("global_step8")
    assert main(["convert", str(source), str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "names the step 'global_step8'" in error and "there: global_step7" in error
    assert main(["convert", str(source), str(tmp_path / "a"), "--tag", "global_step9"]) == 2
    assert "--tag global_step9: names the step" in capsys.readouterr().err
    argv = ["convert", str(source), str(tmp_path / "a"), "--dtype", "bfloat16"]
    assert main([*argv, "--tag", "global_step7"]) == 0
    assert_loads(tmp_path / "a", trainings.truth("qwen3_moe-zero2"), torch.bfloat16)
    latest.write_text("global_step7")
    assert main(["convert", str(source), str(tmp_path / "b")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "source"]
