"""A folder that is damaged or no one checkpoint: one line that says which file and why."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.deepspeed_checkpoint.library import deepspeed_module
from moe_serve.errors import CheckpointError
from moe_serve.tensor_source import open_tensors
from tests.deepspeed.checks import whole_tensors
from tests.deepspeed.conftest import Trainings

pytestmark = [pytest.mark.dist]
Copy = Callable[[str], Path]

OPTIM_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
OPTIM_0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
PARTED_MODEL_1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def refusal(folder: Path) -> str:
    """Why it is not read, in one line with the folder in it."""
    with pytest.raises(CheckpointError) as raised:
        whole_tensors(open_tensors(folder))
    text = str(raised.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def change(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    states = torch.load(file, weights_only=False)
    edit(states)
    torch.save(states, file)


@pytest.mark.parametrize(
    ("run", "name", "message"),
    [
        ("mixtral-zero2", OPTIM_1, r"partition_count \[2, 2\] means 2 optim files, found 1"),
        ("mixtral-zero2", OPTIM_0, r"zero_pp_rank 0 is missing; expected all of 0 to 1"),
        ("mixtral-zero3", OPTIM_1, r"has 2 model files and 1 optim files"),
        ("mixtral-zero3", PARTED_MODEL_1, r"has 1 model files and 2 optim files"),
        ("mixtral-zero2", MODEL, r"has no file \*mp_rank_00_model_states\.pt"),
        ("mixtral-moe", "layer_0_expert_2_mp_rank_00_model_states.pt",
         r"layer_0_expert 2 is missing; expected all of 0 to 3"),
        ("mixtral-moe", "layer_1_expert_3_mp_rank_00_model_states.pt",
         r"has 3 files layer_1_expert_\*, mp_rank_00_model_states\.pt tells of 4"),
        ("mixtral-moe", "layer_1_expert_*", r"expert files of 1 layers, .* tells of 2"),
        ("mixtral-moe", "layer_*", r"expert files of 0 layers, .* tells of 2"),
    ],
)  # fmt: skip
def test_a_missing_file(copy: Copy, run: str, name: str, message: str) -> None:
    folder = copy(run)
    for file in (folder / "global_step2").glob(name):
        file.unlink()
    assert re.search(message, refusal(folder))


@pytest.mark.parametrize("name", [OPTIM_1, MODEL])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file(copy: Copy, name: str, share: float) -> None:
    folder = copy("mixtral-zero2")
    file = folder / "global_step2" / name
    with file.open("rb+") as stream:
        stream.truncate(int(file.stat().st_size * share))
    text = refusal(folder)
    assert str(file) in text
    assert "truncated" in text


def test_a_file_of_another_step(copy: Copy, trainings: Trainings) -> None:
    folder = copy("mixtral-zero3")
    shutil.rmtree(folder / "global_step2")
    shutil.copytree(trainings.step("qwen3_moe-zero3"), folder / "global_step2")
    file = folder / "global_step2" / PARTED_MODEL_1
    change(file, lambda states: states.update(global_steps=2))
    assert f"{file}: of global_steps 2, zero_pp_rank_0" in refusal(folder)


@pytest.mark.parametrize("run", ["mixtral-zero2", "mixtral-zero3"])
def test_an_optimizer_of_another_step(copy: Copy, run: str) -> None:
    folder = copy(run)

    def go_on(states: dict[str, Any]) -> None:
        outer = states["optimizer_state_dict"]
        moments = outer.get("base_optimizer_state") or outer["optimizer_state_dict"]
        for one in moments["state"].values():
            one["step"] += 1

    change(folder / "global_step2" / OPTIM_1, go_on)
    assert f"{OPTIM_1}: steps of the optimizer are 3 but 2 in {OPTIM_0}" in refusal(folder)


@pytest.mark.parametrize(
    "tag", ["global_step9", "", "../mixtral-zero2/global_step2", "config.json"]
)
def test_latest_names_no_step(copy: Copy, tag: str) -> None:
    folder = copy("mixtral-zero2")
    (folder / "latest").write_text(tag)
    text = refusal(folder)
    assert f"names the step {tag!r}" in text
    assert "there: global_step2" in text


def test_latest_chooses_among_steps(copy: Copy, trainings: Trainings) -> None:
    folder = copy("mixtral-zero2")
    shutil.copytree(trainings.step("mixtral-zero3"), folder / "global_step3")
    assert open_tensors(folder).tensors.keys() == trainings.truth("mixtral-zero2").keys()


@pytest.mark.parametrize("number", [1, 3])
def test_files_of_another_number_of_ranks(copy: Copy, number: int) -> None:
    folder = copy("mixtral-zero2")
    for name in (OPTIM_0, OPTIM_1):
        change(
            folder / "global_step2" / name,
            lambda states: states["optimizer_state_dict"].update(partition_count=[number] * 2),
        )
    text = refusal(folder)
    assert f"partition_count [{number}, {number}] means {number} optim files, found 2" in text


def cut(states: dict[str, Any]) -> None:
    groups = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-1].clone()


def pad(states: dict[str, Any]) -> None:
    states["optimizer_state_dict"]["param_alignment_paddings"][0][3] = 5


def drop_group(states: dict[str, Any]) -> None:
    states["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (cut, r"hold 32570 elements of parameter group 0, its parameters .* have 32571"),
        (pad, r"param_alignment_paddings are .* expected the same in all files of a step"),
        (drop_group, r"has 1 parameter groups, .* has 2; expected as many"),
        (lambda s: s["optimizer_state_dict"].update(zero_stage=1), r"zero_stage is 1 but 2 in"),
        (lambda s: s["optimizer_state_dict"].update(zero_stage=3), r"zero_stage 3 with single_"),
        (lambda s: s.pop("optimizer_state_dict"), r"has no optimizer_state_dict"),
        (lambda s: s["optimizer_state_dict"].pop("partition_count"), r"'partition_count'"),
    ],
    ids=["cut", "padding", "groups", "stage", "unfit-stage", "no-states", "no-count"],
)  # fmt: skip
def test_partitions_that_do_not_add_up(
    copy: Copy, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = copy("mixtral-zero2")
    change(folder / "global_step2" / OPTIM_1, edit)
    assert re.search(message, refusal(folder))


def test_parts_of_zero3_that_do_not_add_up(copy: Copy) -> None:
    folder = copy("mixtral-zero3")

    def cut_group(states: dict[str, Any]) -> None:
        groups = states["optimizer_state_dict"]["fp32_flat_groups"]
        groups[2] = groups[2][:-7].clone()

    change(folder / "global_step2" / OPTIM_1, cut_group)
    text = refusal(folder)
    assert re.search(rf"{OPTIM_1}: holds 16347 elements, .* has 16354", text)


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s["param_shapes"][0].update({NORM: torch.Size([33])}),
         rf"param_shapes names {NORM} twice"),
        (lambda s: s["param_shapes"][1].update({NORM: torch.Size([3, 11])}),
         rf"{NORM} has shape \[3, 11\] by param_shapes and \[33\] in the module"),
        (lambda s: s["module"].pop(NORM), rf"param_shapes names {NORM}, which its module lacks"),
        (lambda s: s["frozen_param_shapes"].update({NORM: torch.Size([33])}),
         rf"frozen_param_fragments of {NORM} must have 33 elements, found none"),
        (lambda s: s["frozen_param_fragments"].update({"model.norm.weight": torch.zeros(32)}),
         r"model\.norm\.weight must have 33 elements, found 32"),
        (lambda s: s["module"].update(hook="text"), r"module holds str as hook"),
        (lambda s: s.update(module=None), r"module is NoneType; expected a dict"),
        (lambda s: s.update(param_shapes=None), r"param_shapes has 0 parameter groups, .* has 2"),
        (lambda s: s.update(mp_world_size=2), r"mp_world_size 2, but there are files of 1"),
        (lambda s: s.update(global_steps="two"), r"global_steps is 'two'; expected a number"),
        (lambda s: s.update(ds_autoep_layers=[{"module_path": "x"}]), r"DeepSpeed's AutoEP"),
    ],
)  # fmt: skip
def test_model_states_that_do_not_fit(
    copy: Copy, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = copy("mixtral-zero2")
    change(folder / "global_step2" / MODEL, edit)
    assert re.search(message, refusal(folder))


def test_a_parameter_that_no_rank_of_zero3_has(copy: Copy) -> None:
    folder = copy("mixtral-zero3")
    for file in (folder / "global_step2").glob("*model_states.pt"):
        change(file, lambda states: states["module"].update({"extra.weight": torch.zeros(0)}))
    assert "tensor extra.weight is neither in param_shapes nor" in refusal(folder)


def test_an_expert_under_the_name_of_another(copy: Copy) -> None:
    step = copy("mixtral-moe") / "global_step2"
    names = [f"layer_1_expert_{expert}_mp_rank_00_model_states.pt" for expert in (0, 3)]
    shutil.copy(step / names[0], step / names[1])
    assert f"{names[1]}: holds model.layers.1.mlp.deepspeed_moe" in refusal(step.parent)


def test_an_expert_of_another_layer(copy: Copy) -> None:
    step = copy("mixtral-moe") / "global_step2"
    name = "layer_{}_expert_3_mp_rank_00_model_states.pt"
    shutil.copy(step / name.format(0), step / name.format(1))
    assert "other files of layer_1 are of model.layers.1.mlp" in refusal(step.parent)


def test_the_parts_of_two_trainings_in_one_folder(copy: Copy, trainings: Trainings) -> None:
    folder = copy("mixtral-zero2")
    shutil.copy(trainings.step("mixtral-zero3") / PARTED_MODEL_1, folder / "global_step2")
    assert "expected one checkpoint a folder" in refusal(folder)


def test_the_same_rank_twice(copy: Copy) -> None:
    step = copy("mixtral-zero2") / "global_step2"
    shutil.copy(step / OPTIM_1, step / f"bf16_{OPTIM_1}")
    assert f"{OPTIM_1}: the same rank as bf16_{OPTIM_1}" in refusal(step.parent)


def test_pipeline_stages(copy: Copy) -> None:
    step = copy("mixtral-zero2") / "global_step2"
    shutil.copy(step / MODEL, step / "layer_03-model_00-model_states.pt")
    assert "layer_03-model_00-model_states.pt: a layout that is not read" in refusal(step.parent)


class Payload:
    """Runs a program when it is unpickled by what trusts it."""

    def __init__(self, mark: Path, function: Callable[[str], object]) -> None:
        self.mark, self.function = mark, function

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, (f"touch {self.mark}" if self.function is os.system else "0",)


@pytest.mark.parametrize("name", [OPTIM_0, MODEL])
@pytest.mark.parametrize(
    ("function", "spelling"), [(os.system, "posix.system"), (eval, "builtins.eval")]
)
def test_code_in_a_pickle_does_not_run(
    copy: Copy, tmp_path: Path, name: str, function: Callable[[str], object], spelling: str
) -> None:
    folder, mark = copy("mixtral-zero2"), tmp_path / "it-ran"
    file = folder / "global_step2" / name
    states = torch.load(file, weights_only=False)
    torch.save(states | {"payload": Payload(mark, function)}, file)
    text = refusal(folder)
    assert f"{file}: its pickle asks for {spelling.removeprefix('builtins.')}" in text
    assert not mark.exists()
    # That it would have, is what makes this a test.
    torch.load(file, weights_only=False)
    assert mark.exists() is (function is os.system)


def test_a_class_that_deepspeed_does_not_save(copy: Copy) -> None:
    folder = copy("mixtral-zero2")
    change(folder / "global_step2" / MODEL, lambda states: states.update(args=Path("x")))
    assert re.search(r"its pickle asks for pathlib\.\w+", refusal(folder))


def test_masters_are_not_needed_where_the_module_has_the_weights(
    copy: Copy, trainings: Trainings
) -> None:
    folder = copy("qwen3_moe-zero2")
    for file in (folder / "global_step2").glob("*optim_states.pt"):
        file.unlink()
    found, truth = whole_tensors(open_tensors(folder)), trainings.truth("qwen3_moe-zero2")
    assert found.keys() == truth.keys()
    assert all(torch.equal(one, truth[name].bfloat16()) for name, one in found.items())


def test_zero3_without_masters_has_no_weights(copy: Copy) -> None:
    folder = copy("mixtral-zero3")
    for file in (folder / "global_step2").glob("*optim_states.pt"):
        file.unlink()
    assert "of ZeRO-3, whose weights are in the files *_optim_states.pt: none" in refusal(folder)


def test_safetensors_win_and_a_line_says_so(
    copy: Copy, trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy("mixtral-zero2")
    shutil.copy(f"{trainings.folder('mixtral-zero3')}.safetensors", folder / "model.safetensors")
    with caplog.at_level(logging.INFO):
        found = whole_tensors(open_tensors(folder))
    truth = trainings.truth("mixtral-zero3")
    assert all(torch.equal(one, truth[name]) for name, one in found.items())
    (message,) = [one.getMessage() for one in caplog.records if "safetensors" in one.getMessage()]
    assert "the safetensors are read" in message


def test_a_folder_of_steps_says_which_to_give(copy: Copy, tmp_path: Path) -> None:
    folder = copy("mixtral-zero2")
    (folder / "latest").unlink()
    assert f"write the name of one, such as global_step2, into {folder}/latest" in refusal(folder)
    outer = tmp_path / "trainer"
    for number in (5, 10, 9):
        (outer / f"checkpoint-{number}").mkdir(parents=True)
    text = refusal(outer)
    assert "3 steps of a training: give the folder of one" in text
    assert text.endswith(f"such as {outer / 'checkpoint-10'}")


def test_without_deepspeed_there_is_a_line_to_install_it(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed_module("checkpoint.constants")
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.fp16.loss_scaler", None)
    with pytest.raises(CheckpointError, match=r"pip install 'moe-serve\[deepspeed\]'"):
        open_tensors(trainings.folder("mixtral-zero2"))
