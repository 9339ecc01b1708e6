"""Models with DeepSpeed's own MoE layers: experts in files of their own, and mp ranks' parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.deepspeed_checkpoint.names import family_name
from moe_serve.deepspeed_checkpoint.source import open_deepspeed
from moe_serve.errors import CheckpointError
from moe_serve.models import mixtral, qwen2_moe, qwen3_moe
from tests.deepspeed.checks import (
    assert_same_bits,
    greedy_of_ours,
    greedy_of_transformers,
    whole_tensors,
)
from tests.deepspeed.conftest import Trainings

pytestmark = [pytest.mark.dist]
RUNS = ["mixtral-moe", "qwen3_moe-moe-zero2"]
LAYER = "model.layers.3.mlp"
FILE = Path("f.pt")


@pytest.mark.parametrize("run", RUNS)
def test_every_tensor_is_the_live_models_bit_by_bit(trainings: Trainings, run: str) -> None:
    assert_same_bits(trainings.folder(run), trainings.truth(run))


@pytest.mark.parametrize("run", RUNS)
def test_tokens_are_those_of_transformers(trainings: Trainings, run: str) -> None:
    folder = trainings.folder(run)
    expected = greedy_of_transformers(folder, trainings.truth(run))
    assert greedy_of_ours(folder) == expected


def test_with_zero_experts_are_in_the_trainings_dtype_and_the_rest_in_fp32(
    trainings: Trainings,
) -> None:
    tensors = open_deepspeed(trainings.folder("qwen3_moe-moe-zero2")).tensors
    dtypes = {(".experts." in name, info.dtype) for name, info in tensors.items()}
    assert dtypes == {(True, "BF16"), (False, "F32")}


def test_the_blocks_may_hang_one_attribute_deeper_and_take_the_other_spelling(
    trainings: Trainings, copy: Callable[[str], Path]
) -> None:
    folder = copy("mixtral-moe")
    spelling = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}

    def rename(name: str) -> str:
        for theirs, other in spelling.items():
            name = name.replace(theirs, other)
        return name.replace(".mlp.deepspeed_moe.", ".block_sparse_moe.moe.deepspeed_moe.")

    for file in (folder / "global_step2").glob("*_model_states.pt"):
        states = torch.load(file, weights_only=False)
        tensors = states["module"] if "module" in states else states
        renamed = {rename(name): tensor for name, tensor in tensors.items()}
        torch.save(states | {"module": renamed} if "module" in states else renamed, file)
    truth = trainings.truth("mixtral-moe")
    assert_same_bits(
        folder, {n.replace(".mlp.", ".block_sparse_moe."): one for n, one in truth.items()}
    )


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [
        (mixtral, "gate.wg.weight", "gate.weight"),
        (mixtral, "experts.deepspeed_experts.17.up_proj.weight", "experts.17.w3.weight"),
        (qwen3_moe, "experts.deepspeed_experts.0.w1.weight", "experts.0.gate_proj.weight"),
        (qwen2_moe, "experts.deepspeed_experts.7.w2.weight", "experts.7.down_proj.weight"),
    ],
)
def test_names_become_the_familys(family: Any, theirs: str, ours: str) -> None:
    for block in (LAYER, f"{LAYER}.moe"):
        name = family_name(f"{block}.deepspeed_moe.{theirs}", family.NAMES, {block}, FILE)
        assert name == f"{LAYER}.{ours}"
    # What hangs beside the layer, as a shared expert does, is left alone.
    other = f"{LAYER}.shared_expert.up_proj.weight"
    assert family_name(other, family.NAMES, {f"{LAYER}.moe"}, FILE) == other


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{LAYER}.coefficient.weight", "residual MoE layer"),
        (f"{LAYER}.mlp.w1.weight", "residual MoE layer"),
        (f"{LAYER}.deepspeed_moe.gate.wg.bias", "has no place"),
        (f"{LAYER}.deepspeed_moe.experts.deepspeed_experts.0.w1.bias", "has no place"),
        (f"{LAYER}.deepspeed_moe.experts.deepspeed_experts.0.fc1.weight", "has no place"),
        ("model.layers.3.attn.deepspeed_moe.gate.wg.weight", "where the family has none"),
    ],
)
def test_what_no_family_has_is_named(name: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as raised:
        family_name(name, qwen3_moe.NAMES, {LAYER}, FILE)
    assert name in str(raised.value)


def split(folder: Path, dim_of: Callable[[str], int | None]) -> None:
    """Make two mp ranks of one: of each tensor a half along a dimension, or a copy."""
    for file in (folder / "global_step2").glob("*mp_rank_00_model_states.pt"):
        states = torch.load(file, weights_only=False)
        tensors = states.get("module", states)
        for rank in range(2):
            own = {
                name: tensor if (dim := dim_of(name)) is None else tensor.chunk(2, dim)[rank]
                for name, tensor in tensors.items()
            }
            own = {name: tensor.clone() for name, tensor in own.items()}
            new = states | {"module": own, "mp_world_size": 2} if "module" in states else own
            torch.save(new, file.with_name(file.name.replace("mp_rank_00", f"mp_rank_{rank:02d}")))


def megatron(name: str) -> int | None:
    """Columns and rows as tensor parallelism parts them; the experts too."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "w1.weight", "w3.weight")):
        return 0
    return 1 if name.endswith(("o_proj.weight", "w2.weight")) else None


def test_parts_of_two_mp_ranks_lie_side_by_side(
    trainings: Trainings, copy: Callable[[str], Path]
) -> None:
    folder = copy("mixtral-moe")
    split(folder, megatron)
    assert_same_bits(folder, trainings.truth("mixtral-moe"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.__setitem__("model.norm.weight", t["model.norm.weight"] + 1e-6),
         r"model\.norm\.weight of shape \[33\] is whole, but has other values"),
        (lambda t: t.pop("model.norm.weight"), r"holds model\.norm\.weight, which is in no file"),
        (lambda t: t.__setitem__("model.norm.weight", t["model.norm.weight"][:11]),
         r"model\.norm\.weight is torch.float32 of shape \[11\], in mp_rank_00"),
    ],
    ids=["other-values", "missing", "other-shape"],
)  # fmt: skip
def test_copies_that_differ_are_refused(
    copy: Callable[[str], Path], change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = copy("mixtral-moe")
    split(folder, megatron)
    file = folder / "global_step2" / "mp_rank_01_model_states.pt"
    states = torch.load(file, weights_only=False)
    change(states["module"])
    torch.save(states, file)
    with pytest.raises(CheckpointError, match=message) as raised:
        whole_tensors(open_deepspeed(folder))
    assert "\n" not in str(raised.value)


def test_parts_of_gate_and_up_in_one_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("mixtral-zero0")
    split(folder, lambda name: 1 if name.endswith("gate_up_proj") else None)
    with pytest.raises(CheckpointError, match="is a part of gate and up in one"):
        open_deepspeed(folder)


def test_a_part_that_does_not_add_up_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("mixtral-zero0")
    split(folder, lambda name: 0 if name.endswith("lm_head.weight") else None)
    # 323 rows are 162 and 161: first unlike each other, then alike and too few.
    with pytest.raises(CheckpointError, match=r"of shape \[161, 33\], in mp_rank_00"):
        open_deepspeed(folder)
    step = folder / "global_step2"
    shutil.copy(step / "mp_rank_01_model_states.pt", step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"\[161, 33\] on 2 mp ranks; expected \[323, 33\]"):
        open_deepspeed(folder)
