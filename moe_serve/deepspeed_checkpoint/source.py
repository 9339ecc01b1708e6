"""A trainer's folder as a source of tensors: `latest`, the step that it names, config.json beside.

Only pickles are in memory, and of the mapped files what is just read. What comes from where:

    ZeRO-1, -2, -3     fp32 masters from the optimizer's files; buffers, frozen and shared ones too
    no optimizer files the module's tensors, in the dtype of the training
    DeepSpeed's MoE    experts from their own files, in the dtype of the training; the rest as above
    several mp ranks   by config.json: whole and equal in all, or side by side along one dimension
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from moe_serve.checkpoint import FLOAT_DTYPES, TensorInfo
from moe_serve.deepspeed_checkpoint.expert_files import read_experts, rename
from moe_serve.deepspeed_checkpoint.lazy_tensor import LazyTensor
from moe_serve.deepspeed_checkpoint.model_parallel import merge_mp_ranks
from moe_serve.deepspeed_checkpoint.model_states import ModelStates, read_model_states
from moe_serve.deepspeed_checkpoint.step_files import (
    ModelParallelFiles,
    find_files,
    step_folder,
)
from moe_serve.deepspeed_checkpoint.zero_partitions import merge_ranks
from moe_serve.errors import CheckpointError
from moe_serve.model_folder import read_config
from moe_serve.models.registry import find_family
from moe_serve.models.sources import decoder_sources
from moe_serve.parallel.shard import Span

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()} | {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSource:
    """A `TensorSource`. The files stay mapped as long as it lives."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    lazy: Mapping[str, LazyTensor]

    def read(
        self, parts: Mapping[str, Sequence[tuple[Span, ...]]]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """As `TensorSource` says, in the order in which the tensors lie in the files."""
        for name in self.lazy:
            for index, part in enumerate(parts.get(name, ())):
                yield name, index, self.lazy[name].read(part)


def open_deepspeed(
    folder: Path, *, tag: str | None = None, show_progress: bool = False
) -> DeepSpeedSource:
    """Read and check all but the tensors, of the step `tag` or the one that `latest` names.

    `show_progress`: a bar on stderr, on a terminal only.

    Raises `CheckpointError` naming the file, what is wrong in it, and what was expected.
    """
    step = step_folder(folder, tag)
    by_rank = find_files(step)
    console = Console(stderr=True)
    ranks = track(
        by_rank, "Opening files", console=console, transient=True,
        disable=not (show_progress and console.is_terminal),
    )  # fmt: skip
    models: list[ModelStates] = []
    merged: list[dict[str, LazyTensor]] = []
    for files in ranks:
        own = [read_model_states(file) for file in files.models]
        _check_models(models[:1] + own, len(by_rank))
        merged.append(_with_experts(files, own))
        models += own
    lazy = _whole_model(folder, by_rank, merged)
    source = DeepSpeedSource(
        folder=folder, lazy=lazy, tensors={name: _info(name, one) for name, one in lazy.items()}
    )
    logger.info("%s: %s", step, _summary(by_rank[0], source.tensors))
    return source


def _with_experts(
    files: ModelParallelFiles, models: Sequence[ModelStates]
) -> dict[str, LazyTensor]:
    """Of one mp rank."""
    tensors = merge_ranks(files, models)
    if not files.experts and not models[0].num_experts:
        return tensors
    if files.is_parted:
        raise CheckpointError(
            f"{models[0].file}: of ZeRO-3, with experts in files of their own; DeepSpeed's MoE "
            "trains without it: expected files of one training"
        )
    experts = read_experts(files, models[0])
    for name in experts.keys() & tensors.keys():
        raise CheckpointError(
            f"{models[0].file}: holds {name}, as {experts[name].file.name} does; expected it once"
        )
    return tensors | experts


def _whole_model(
    folder: Path,
    by_rank: Sequence[ModelParallelFiles],
    merged: Sequence[Mapping[str, LazyTensor]],
) -> Mapping[str, LazyTensor]:
    """By the names and shapes of the family in config.json, which is read where these matter."""
    if len(merged) == 1 and not by_rank[0].experts:
        return merged[0]
    config = read_config(folder)
    family = find_family(config.architectures)
    ranks = [rename(one, family.names) if by_rank[0].experts else one for one in merged]
    if len(ranks) == 1:
        return ranks[0]
    shapes = {name: tensor.shape for name, tensor in ranks[0].items()}
    expected = {
        name: source.shape
        for source in decoder_sources(family.spec(config), family.names, shapes)
        for name in source.names
    }
    return merge_mp_ranks(ranks, expected)


def _check_models(models: Sequence[ModelStates], num_mp_ranks: int) -> None:
    first = models[0]
    for model in models:
        if model.global_steps != first.global_steps:
            raise CheckpointError(
                f"{model.file}: of global_steps {model.global_steps}, {first.file.name} of "
                f"{first.global_steps}; expected files of one step"
            )
        if model.mp_world_size != num_mp_ranks:
            raise CheckpointError(
                f"{model.file}: mp_world_size {model.mp_world_size}, but there are files of "
                f"{num_mp_ranks} mp ranks; expected as many"
            )
        if model.groups != first.groups:
            raise CheckpointError(
                f"{model.file}: its param_shapes differ from those of {first.file.name}; "
                "expected files of one model"
            )


def _info(name: str, tensor: LazyTensor) -> TensorInfo:
    if tensor.dtype not in _DTYPE_NAMES:
        raise CheckpointError(f"{tensor.file}: tensor {name} has the unknown dtype {tensor.dtype}")
    dtype = _DTYPE_NAMES[tensor.dtype]
    return TensorInfo(file=tensor.file, dtype=dtype, shape=tensor.shape, start=None)


def _summary(files: ModelParallelFiles, tensors: Mapping[str, TensorInfo]) -> str:
    dtypes = ", ".join(sorted({info.dtype for info in tensors.values()}))
    origin = "optimizer's masters" if files.optimizers else "module's tensors (no optimizer files)"
    experts = "experts from their own files, the rest from the " if files.experts else "from the "
    return f"{len(tensors)} tensors ({dtypes}) saved by DeepSpeed, {experts}{origin}"
