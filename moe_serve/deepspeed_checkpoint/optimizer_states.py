"""What a `*zero_pp_rank_*_optim_states.pt` says: one rank's part of the fp32 master weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_serve.deepspeed_checkpoint.library import deepspeed_module
from moe_serve.deepspeed_checkpoint.safe_load import load_file
from moe_serve.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """`groups`: a vector a parameter group, for ZeRO-3 a sub-group. `partition_counts`: among how
    many ranks each group is parted, for ZeRO-3 one number for all. `paddings`: elements after each
    parameter, by group. `rank_paddings`: elements that end this rank's vector, where it has them
    still. `steps`: how many the optimizer has made, where it tells.
    """

    file: Path
    stage: int
    groups: tuple[Tensor, ...]
    partition_counts: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    rank_paddings: tuple[int, ...] | None
    steps: int | None


def read_optimizer_states(files: Sequence[Path]) -> list[OptimizerStates]:
    """Of all ranks, in order; they are of one stage, one number of ranks, one step.

    Raises `CheckpointError` naming the file and the field.
    """
    states = [_read(file) for file in files]
    first = states[0]
    for other in states[1:]:
        for field in ("stage", "partition_counts", "paddings", "steps"):
            found, expected = getattr(other, field), getattr(first, field)
            if found != expected:
                raise CheckpointError(
                    f"{other.file}: {_SPOKEN[field]} {found} but {expected} in {first.file.name}; "
                    "expected the same in all files of a step"
                )
        if len(other.groups) != len(first.groups):
            raise CheckpointError(
                f"{other.file}: has {len(other.groups)} parameter groups, {first.file.name} has "
                f"{len(first.groups)}; expected as many"
            )
    num_ranks = max(first.partition_counts)
    if num_ranks != len(files):
        raise CheckpointError(
            f"{first.file}: partition_count {list(first.partition_counts)} means {num_ranks} optim "
            f"files, found {len(files)}: {'some are missing' if num_ranks > len(files) else ''}"
            f"{'files of another training are among them' if num_ranks < len(files) else ''}"
        )
    return states


_SPOKEN = {
    "stage": "zero_stage is",
    "partition_counts": "partition_count is",
    "paddings": "param_alignment_paddings are",
    "steps": "steps of the optimizer are",
}


def _read(file: Path) -> OptimizerStates:
    constants = deepspeed_module("checkpoint.constants")
    found = load_file(file).get(constants.OPTIMIZER_STATE_DICT)
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{file}: has no {constants.OPTIMIZER_STATE_DICT}; not what ZeRO saves"
        )
    is_parted = constants.FP32_FLAT_GROUPS in found
    key = constants.FP32_FLAT_GROUPS if is_parted else constants.SINGLE_PARTITION_OF_FP32_GROUPS
    # DeepSpeed's optimizer for bf16 parts its states as ZeRO-1 does and names no stage.
    stage = found.get(constants.ZERO_STAGE, 1)
    if stage not in (1, 2, 3) or (stage == 3) is not is_parted:
        raise CheckpointError(
            f"{file}: {constants.ZERO_STAGE} {stage!r} with {key}; expected 1, 2 or 3 and its own"
        )
    moments = found.get(
        constants.OPTIMIZER_STATE_DICT if is_parted else constants.BASE_OPTIMIZER_STATE
    )
    try:
        return OptimizerStates(
            file=file,
            stage=int(stage),
            groups=tuple(_vectors(file, key, found.get(key))),
            partition_counts=_partition_counts(found[constants.PARTITION_COUNT]),
            paddings=_paddings(found.get(constants.PARAM_ALIGNMENT_PADDINGS)),
            rank_paddings=_rank_paddings(found.get(constants.GROUP_PADDINGS)),
            steps=_steps(moments),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not what ZeRO saves ({error!r})") from error


def _vectors(file: Path, key: str, found: Any) -> Sequence[Tensor]:
    if not isinstance(found, (list, tuple)):
        raise CheckpointError(f"{file}: {key} is {type(found).__name__}; expected a list")
    for index, vector in enumerate(found):
        if not isinstance(vector, Tensor) or vector.dim() != 1 or not vector.is_floating_point():
            raise CheckpointError(f"{file}: {key}[{index}] is no vector of floating-point numbers")
    return [vector.detach() for vector in found]


def _partition_counts(found: Any) -> tuple[int, ...]:
    counts = tuple(int(count) for count in found) if isinstance(found, list) else (int(found),)
    if min(counts, default=0) < 1:
        raise ValueError(f"partition_count {found!r}")
    return counts


def _paddings(found: Any) -> tuple[tuple[int, ...], ...] | None:
    return None if found is None else tuple(tuple(int(one) for one in group) for group in found)


def _rank_paddings(found: Any) -> tuple[int, ...] | None:
    return None if found is None else tuple(int(one) for one in found)


def _steps(moments: Any) -> int | None:
    """Where each parameter or each group counts them, as the optimizers of torch and DeepSpeed
    do; the most of all.
    """
    if not isinstance(moments, Mapping):
        return None
    entries = [*dict(moments.get("state") or {}).values(), *(moments.get("param_groups") or [])]
    steps = [entry["step"] for entry in entries if isinstance(entry, Mapping) and "step" in entry]
    return max((int(step) for step in steps), default=None)
