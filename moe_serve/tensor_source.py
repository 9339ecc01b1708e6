"""Where a model's tensors come from: safetensors, or what DeepSpeed saved in the folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from moe_serve.checkpoint import Checkpoint, TensorInfo
from moe_serve.deepspeed_checkpoint.step_files import is_deepspeed
from moe_serve.errors import CheckpointError
from moe_serve.parallel.shard import Span

logger = logging.getLogger(__name__)

# What trainers call the folders of their steps: Hugging Face's, and DeepSpeed's own.
_STEP_FOLDERS = ("checkpoint-[0-9]*", "global_step[0-9]*")


class TensorSource(Protocol):
    """All tensors of a model by their Hugging Face names; none is in memory until it is read."""

    @property
    def folder(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(
        self, parts: Mapping[str, Sequence[tuple[Span, ...]]]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, index, part `index` of that tensor) for each part asked for, in an order that
        suits the files. A part is a range per dimension. Copy what is yielded, don't keep it.
        """


def open_tensors(folder: Path) -> TensorSource:
    """Safetensors where there are any, else what DeepSpeed saved there.

    Raises `CheckpointError` naming the file that is missing, damaged or not understood.
    """
    has_safetensors = any(folder.glob("*.safetensors*"))
    if is_deepspeed(folder):
        if not has_safetensors:
            # Only here: nothing of it is needed for other folders.
            from moe_serve.deepspeed_checkpoint.source import open_deepspeed

            return open_deepspeed(folder)
        logger.info(
            "%s: has safetensors and a DeepSpeed checkpoint; the safetensors are read", folder
        )
    if not has_safetensors:
        _refuse_steps(folder)
    return Checkpoint.open(folder)


def _refuse_steps(folder: Path) -> None:
    """A folder of steps that does not say which is the model."""
    pattern = next((one for one in _STEP_FOLDERS if any(folder.glob(one))), None)
    if pattern is None:
        return
    names = [path.name for path in folder.glob(pattern) if path.is_dir()]
    last = max(names, key=lambda name: int("0" + "".join(filter(str.isdigit, name))))
    hint = (
        f"give the folder of one, such as {folder / last}"
        if last.startswith("checkpoint-")
        else f"write the name of one, such as {last}, into {folder / 'latest'}"
    )
    raise CheckpointError(
        f"{folder}: no *.safetensors file and no file latest as DeepSpeed writes, but "
        f"{len(names)} {'step' if len(names) == 1 else 'steps'} of a training: {hint}"
    )
