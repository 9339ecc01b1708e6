"""Models that were trained under ZeRO, against DeepSpeed's own reader and transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.deepspeed_checkpoint.library import deepspeed_module
from moe_serve.deepspeed_checkpoint.source import open_deepspeed
from tests.deepspeed.checks import (
    assert_same_bits,
    greedy_of_ours,
    greedy_of_transformers,
    whole_tensors,
)
from tests.deepspeed.conftest import Trainings

STAGES = ["mixtral-zero1", "mixtral-zero2", "mixtral-zero3", "qwen3_moe-zero1", "qwen3_moe-zero2",
          "qwen3_moe-zero3"]  # fmt: skip
pytestmark = [pytest.mark.dist]
Copy = Callable[[str], Path]


@pytest.mark.parametrize("run", [*STAGES, "mixtral-zero0"])
def test_every_tensor_is_deepspeeds_bit_by_bit(trainings: Trainings, run: str) -> None:
    assert_same_bits(trainings.folder(run), trainings.truth(run))


@pytest.mark.parametrize("run", STAGES)
def test_tokens_are_those_of_transformers(trainings: Trainings, run: str) -> None:
    folder = trainings.folder(run)
    expected = greedy_of_transformers(folder, trainings.truth(run))
    assert greedy_of_ours(folder) == expected


def test_two_ranks_read_their_parts(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folder = trainings.folder("mixtral-zero3")
    expected = greedy_of_transformers(folder, trainings.truth("mixtral-zero3"))
    assert greedy_of_ours(folder, tensor_parallel_size=2) == expected


def test_what_zero1_does_not_train_is_the_modules(trainings: Trainings) -> None:
    """DeepSpeed's own reader leaves it out."""
    run = "mixtral-zero1-frozen"
    truth = trainings.truth(run)
    found = whole_tensors(open_deepspeed(trainings.folder(run)))
    assert found.keys() - truth.keys() == {
        "model.norm.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight"
    }  # fmt: skip
    module = torch.load(trainings.step(run) / "mp_rank_00_model_states.pt", weights_only=False)[
        "module"
    ]
    for name, tensor in found.items():
        expected = truth.get(name, module[name])
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


def edit_optimizers(folder: Path, edit: Callable[[int, dict[str, Any]], None]) -> None:
    """`edit(rank, states)` of each file."""
    for rank, file in enumerate(sorted(folder.glob("global_step*/*_optim_states.pt"))):
        states = torch.load(file, weights_only=False)
        edit(rank, states["optimizer_state_dict"])
        torch.save(states, file)


def test_files_older_than_alignment(trainings: Trainings, copy: Copy) -> None:
    folder = copy("mixtral-zero2")
    edit_optimizers(folder, lambda _, states: states.pop("param_alignment_paddings"))
    assert_same_bits(folder, trainings.truth("mixtral-zero2"))


def test_the_scale_of_a_loss_in_fp16_is_data(trainings: Trainings, copy: Copy) -> None:
    folder = copy("mixtral-zero2")
    scaler = deepspeed_module("runtime.fp16.loss_scaler").DynamicLossScaler(
        2.0**16, 1000, 1.0, 2, False, dtype=torch.half
    )
    edit_optimizers(folder, lambda _, states: states.update(loss_scaler=scaler))
    assert_same_bits(folder, trainings.truth("mixtral-zero2"))


def test_vectors_with_their_filling_and_no_stage(trainings: Trainings, copy: Copy) -> None:
    """As DeepSpeed's optimizer for bf16 saves them."""
    folder = copy("qwen3_moe-zero1")
    assert all("bf16_" in file.name for file in folder.glob("global_step*/*_optim_states.pt"))

    def fill(rank: int, states: dict[str, Any]) -> None:
        key = "single_partition_of_fp32_groups"
        pairs = zip(states[key], states["group_paddings"], strict=True)
        states[key] = [torch.nn.functional.pad(vector, (0, padding)) for vector, padding in pairs]
        assert rank == 0 or any(states["group_paddings"])
        del states["zero_stage"]

    edit_optimizers(folder, fill)
    assert_same_bits(folder, trainings.truth("qwen3_moe-zero1"))


def test_gaps_between_parameters_are_left_out(trainings: Trainings, copy: Copy) -> None:
    """As an alignment of each parameter makes them."""
    folder = copy("mixtral-zero2")
    step, key = folder / "global_step2", "single_partition_of_fp32_groups"
    model = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)
    files = sorted(step.glob("*_optim_states.pt"))
    ranks = [torch.load(file, weights_only=False) for file in files]
    for index, shapes in enumerate(model["param_shapes"]):
        sizes = [shape.numel() for shape in shapes.values()]
        gaps = [-size % 7 for size in sizes]
        whole = torch.cat([one["optimizer_state_dict"][key][index] for one in ranks])
        pieces = zip(whole.split(sizes), gaps, strict=True)
        spread = torch.cat([torch.nn.functional.pad(one, (0, gap), value=9) for one, gap in pieces])
        assert len(spread) > len(whole)
        for one, part in zip(ranks, spread.chunk(2), strict=True):
            one["optimizer_state_dict"][key][index] = part.clone()
            one["optimizer_state_dict"]["param_alignment_paddings"][index] = gaps
    for one, file in zip(ranks, files, strict=True):
        torch.save(one, file)
    assert_same_bits(folder, trainings.truth("mixtral-zero2"))


@pytest.mark.parametrize("run", ["mixtral-zero2", "mixtral-zero3"])
def test_copies_on_two_mp_ranks_are_one_tensor(trainings: Trainings, copy: Copy, run: str) -> None:
    folder = copy(run)
    for file in list(folder.glob("global_step2/*_states.pt")):
        states = torch.load(file, weights_only=False)
        if "module" in states:
            torch.save(states | {"mp_world_size": 2}, file)
        shutil.copy(file, file.with_name(file.name.replace("mp_rank_00", "mp_rank_01")))
    assert_same_bits(folder, trainings.truth(run))
