"""Writes one shard: each tensor to its place as it comes from the source, a piece at a time."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_serve.convert.new_folder import writing
from moe_serve.convert.outputs import Output, parts_by_source
from moe_serve.convert.shards import Shard
from moe_serve.errors import ConfigError
from moe_serve.tensor_source import TensorSource

# Elements that are cast and written at once.
_PIECE = 2**22
_READ_BYTES = 2**20


def write_shard(
    file: Path,
    shard: Shard,
    outputs: Iterable[Output],
    source: TensorSource,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> str:
    """The SHA-256 of the new file, as hex digits, after its bytes have reached the disk.

    One tensor of the source is in memory at a time. `advance` is told the bytes written. Raises
    `ConfigError` where the disk is full, or where a finite value would become infinite in `dtype`.
    """
    with _HashedFile(file) as hashed:
        hashed.write(shard.head, 0)
        parts = parts_by_source(outputs)
        boxes = {name: [output.part for output in parts[name]] for name in parts}
        num_written = 0
        for name, index, part in source.read(boxes):
            output = parts[name][index]
            offset = shard.places[output.name].start
            turned = part.mT if output.is_transposed else part
            assert turned.numel() == math.prod(output.shape), f"{name}: part {index} is no {output}"
            flat = turned.reshape(-1)
            for first in range(0, len(flat), _PIECE):
                memory = _bytes(_cast(output.name, flat[first : first + _PIECE], dtype))
                hashed.write(memory, offset)
                offset += len(memory)
                advance(len(memory))
            num_written += 1
        assert num_written == len(shard.places), f"{num_written} tensors came for {shard.name}"
        return hashed.finish()


def _cast(name: str, piece: Tensor, dtype: torch.dtype) -> Tensor:
    if piece.dtype == dtype:
        return piece
    cast = piece.to(dtype)
    largest = torch.finfo(dtype).max
    low, high = piece.aminmax()
    # Quick, and enough nearly always; what is no number fails the comparison.
    if -largest <= low and high <= largest:
        return cast
    if (lost := cast.isinf() & piece.isfinite()).any():
        raise ConfigError(
            f"--dtype {str(dtype).removeprefix('torch.')}: {name} holds {piece[lost][0].item():g}, "
            f"beyond its largest value {largest:g}; take --dtype bfloat16 or float32"
        )
    return cast


def _bytes(piece: Tensor) -> memoryview:
    return piece.detach().contiguous().view(torch.uint8).numpy().data


class _HashedFile:
    """Takes bytes for any place, and hashes them in order: those that come in order, as they come.

    [0, hashed) has gone into the hash; what lies beyond is read once more at the end.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with writing(file):
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash = hashlib.sha256()
        self._num_hashed = 0

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *exc: Any) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        if offset == self._num_hashed:
            self._hash.update(data)
            self._num_hashed += len(data)
        memory = memoryview(data)
        with writing(self._file):
            while memory:
                num_written = os.pwrite(self._descriptor, memory, offset)
                memory = memory[num_written:]
                offset += num_written

    def finish(self) -> str:
        with writing(self._file):
            os.fsync(self._descriptor)
            while data := os.pread(self._descriptor, _READ_BYTES, self._num_hashed):
                self._hash.update(data)
                self._num_hashed += len(data)
        return self._hash.hexdigest()
