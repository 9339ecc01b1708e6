"""Where a model's tensors come from: safetensors, or what DeepSpeed saved in the folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from moe_serve.checkpoint import Checkpoint, TensorInfo
from moe_serve.parallel.shard import Span


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
    """Raises `CheckpointError` naming the file that is missing, damaged or not understood."""
    return Checkpoint.open(folder)
