"""The safetensors files of a model folder, checked before anything is read from them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_serve.errors import CheckpointError
from moe_serve.parallel.shard import Span

INDEX_NAME = "model.safetensors.index.json"
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What is known of one tensor. `dtype` is safetensors' name for it; `start`: where in the file
    its first byte is, None where its bytes do not lie there side by side.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int | None

    @property
    def itemsize(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def run_start(self, part: Sequence[Span]) -> int | None:
        """Where in the file a part begins, a range per dimension; None where its bytes are not all
        side by side.

        Example: of a [4, 8] tensor, rows 1 to 3 are; columns 0 to 4 are not, but for a single row.
        """
        if self.start is None:
            return None
        offset, step, is_whole = 0, self.itemsize, True
        for span, size in zip(reversed(part), reversed(self.shape), strict=True):
            if not is_whole and span.size != 1:
                return None
            offset += span.start * step
            step *= size
            is_whole = is_whole and span.size == size
        return self.start + offset


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All tensors of a folder by name. Only headers are in memory."""

    folder: Path
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read and check the index and every header.

        Raises `CheckpointError` naming the file: missing, truncated, corrupt, or without a tensor
        that the index promises.
        """
        index = folder / INDEX_NAME
        if index.exists():
            return cls(folder=folder, tensors=_indexed_tensors(folder, _read_index(index)))
        tensors: dict[str, TensorInfo] = {}
        for file in _files_without_index(folder):
            for name, info in read_header(file).items():
                if name in tensors:
                    raise CheckpointError(
                        f"{folder}: tensor {name} is in {tensors[name].file.name} and in "
                        f"{file.name}; without {INDEX_NAME} neither is preferred"
                    )
                tensors[name] = info
        return cls(folder=folder, tensors=tensors)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def read(
        self, parts: Mapping[str, Sequence[tuple[Span, ...]]]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, index, part `index` of that tensor) for each part asked for, file by file.

        A part is a range per dimension; only its bytes are touched. Tensors lie in the mapped
        file: copy, don't keep.
        """
        by_file: dict[Path, list[str]] = {}
        for name in parts:
            if parts[name]:
                by_file.setdefault(self.tensors[name].file, []).append(name)
        for file in sorted(by_file):
            with _open(file) as shard:
                for name in by_file[file]:
                    tensor = shard.get_slice(name)
                    for index, part in enumerate(parts[name]):
                        yield name, index, tensor[tuple(slice(*span) for span in part)]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, after checking that the file is as long as they need."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{file}: truncated or not safetensors: its header needs {8 + length} bytes, "
                f"the file has {size}"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ends = {name: _end(file, name, entry) for name, entry in header.items()}
        infos = {
            name: TensorInfo(
                file=file,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=8 + length + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file}: its header is corrupt ({error!r})") from error
    expected = 8 + length + max(ends.values(), default=0)
    if expected != size:
        raise CheckpointError(
            f"{file}: its header declares {expected} bytes, the file has {size}: "
            f"{'truncated' if size < expected else 'more than belongs to it'}; download it again"
        )
    with _open(file):
        # The library checks the rest (overlaps, holes).
        return infos


def _end(file: Path, name: str, entry: dict[str, Any]) -> int:
    """Where a tensor's data end, after checking that its dtype and shape fill them."""
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype not in _DTYPE_BYTES:
        raise CheckpointError(f"{file}: tensor {name} has the unknown dtype {dtype!r}")
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * _DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{file}: tensor {name} with dtype {dtype} and shape {list(shape)} needs "
            f"{math.prod(shape) * _DTYPE_BYTES[dtype]} bytes, the header gives it {end - begin}"
        )
    return int(end)


def _open(file: Path) -> Any:
    """The library's reader (untyped). Raises `CheckpointError` naming the file."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): Path(file) for name, file in weight_map.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
    outside = sorted({str(file) for file in files.values() if file.name != str(file)})
    if outside:
        raise CheckpointError(f"{index}: names files outside the folder: {', '.join(outside)}")
    return {name: file.name for name, file in files.items()}


def _indexed_tensors(folder: Path, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} names {_count(len(missing), 'file')} not there: "
            f"{', '.join(missing)}; download the model again"
        )
    headers = {name: read_header(folder / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise CheckpointError(
                f"{folder}: {INDEX_NAME} places tensor {tensor} in {name}, which lacks it"
            )
    return {tensor: headers[name][tensor] for tensor, name in weight_map.items()}


def _files_without_index(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors file (other formats are not read)")
    names = {file.name for file in files}
    shards = [match for match in map(_SHARD.fullmatch, sorted(names)) if match]
    missing = {
        f"{shard['stem']}-{number:05d}-of-{shard['count']}.safetensors"
        for shard in shards
        for number in range(1, int(shard["count"]) + 1)
    } - names
    if missing:
        raise CheckpointError(
            f"{folder}: {_count(len(missing), 'shard')} not there: {', '.join(sorted(missing))}"
        )
    return files


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
