"""Named values and arrays in .json, .npz, .pt and .yaml files, read with suspicion."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from moe_serve.errors import RecordingError

SUFFIXES = (".json", ".npz", ".pt", ".yaml", ".yml")
# A small file can claim to hold petabytes: an archive that unpacks, a tensor that repeats its
# numbers, YAML that names a list again and again.
MAX_BYTES = 4 * 2**30
# Whole numbers up to here are exact as floats too, and sums of them fit in 64 bits.
MAX_WHOLE = 2**53

_ABSENT = object()


class Document:
    """Named values of a file. Each lookup names, in its `RecordingError`, file, field and limit."""

    def __init__(self, values: Any, source: str) -> None:
        if not isinstance(values, Mapping):
            raise RecordingError(f"{source} must hold names with values, not {_kind(values)}")
        self._values = values
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self._values]

    def get(self, name: str) -> Any:
        value = self._values.get(name, _ABSENT)
        if value is _ABSENT:
            raise self.error(f"{name} is missing")
        return value

    def error(self, text: str) -> RecordingError:
        return RecordingError(f"{self.source}: {text}")

    def has_format(self, name: str) -> bool:
        return bool(self._values.get("format") == name)

    def check_format(self, name: str, version: int) -> None:
        if not self.has_format(name):
            raise self.error(f"format {_short(self.get('format'))} must be {name!r}")
        if self.whole("version") != version:
            raise self.error(
                f"version {self.get('version')} of {name} is not known here; {version} is"
            )

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} must be text, not {_kind(value)}")
        return value

    def whole(self, name: str, least: int = 0, most: int = MAX_WHOLE) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(
                f"{name} {_short(value)} must be a whole number from {least} to {most}"
            )
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise self.error(f"{name} {_short(value)} must be a number, 0 or more")
        return float(value)

    def section(self, name: str) -> Document:
        return Document(self.get(name), f"{self.source}: {name}")

    def integers(
        self,
        name: str,
        shape: Sequence[int | None],
        *,
        least: int = 0,
        below: int = MAX_WHOLE,
    ) -> npt.NDArray[np.int64]:
        """An array of whole numbers, `least` or more; None in `shape` is any size."""
        array = self._array(name, shape)
        if array.dtype.kind not in "iu" and array.size:
            raise self.error(f"{name} must hold whole numbers, not {_kind(array)}")
        self._check_range(name, array, least, below)
        return array.astype(np.int64)

    def numbers(self, name: str, shape: Sequence[int | None]) -> npt.NDArray[np.float64]:
        """An array of finite numbers, 0 or more."""
        array = self._array(name, shape)
        if array.dtype.kind not in "iuf" and array.size:
            raise self.error(f"{name} must hold numbers, not {_kind(array)}")
        self._check_range(name, array, 0, math.inf)
        return array.astype(np.float64)

    def _array(self, name: str, shape: Sequence[int | None]) -> npt.NDArray[Any]:
        try:
            array = np.asarray(self.get(name))
        except (ValueError, OverflowError):
            raise self.error(f"{name} has rows of differing lengths") from None
        if array.size == 0 and None not in shape and 0 in shape:
            # Lists without numbers do not tell the sizes inside them.
            array = array.reshape([size or 0 for size in shape])
        matches = array.ndim == len(shape) and all(
            size in (None, found) for size, found in zip(shape, array.shape, strict=True)
        )
        if not matches:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.error(f"{name} has shape {list(array.shape)}, not [{wanted}]")
        return array

    def _check_range(self, name: str, array: npt.NDArray[Any], least: int, below: float) -> None:
        # Not `array < least or`: NaN fails every comparison.
        wrong = np.argwhere(~((array >= least) & (array < below)))
        if len(wrong):
            index = tuple(wrong[0].tolist())
            limit = "finite" if below == math.inf else f"below {below}"
            raise self.error(
                f"{name}{list(index)} is {array[index]}; it must be {least} or more and {limit}"
            )


def read_document(path: str | Path) -> Document:
    """Raises `RecordingError` where the file is not what its suffix says."""
    path = Path(path)
    suffix = _suffix(path)
    try:
        if suffix == ".npz":
            values = _read_npz(path)
        elif suffix == ".pt":
            values = _read_pt(path)
        elif suffix == ".json":
            values = json.loads(path.read_text(encoding="utf-8"))
        else:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        _check_size(path, _num_bytes(values, {}))
    except RecordingError:
        raise
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from error
    # What a broken file makes these readers trip over is any exception at all.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RecordingError(f"{path} is no readable {suffix} file: {reason}") from error
    return Document(values, str(path))


def write_document(values: Mapping[str, Any], path: str | Path) -> None:
    """Arrays stay arrays in .npz and .pt and become lists elsewhere; None is left out of .npz."""
    path = Path(path)
    suffix = _suffix(path)
    try:
        if suffix == ".npz":
            _write_npz(flattened(values), path)
        elif suffix == ".pt":
            _write_pt(values, path)
        elif suffix == ".json":
            text = json.dumps(plain(values), separators=(",", ":"), allow_nan=False)
            path.write_text(text, encoding="utf-8")
        else:
            text = yaml.safe_dump(plain(values), default_flow_style=None, sort_keys=False)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordingError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_npz(values: Mapping[str, Any], path: Path) -> None:
    """What `np.savez_compressed` writes, at zlib's fastest level: routes take a ninth of its time,
    for which a server's requests wait, and about as many bytes.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, value in values.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(value), allow_pickle=False)


def plain(value: Any) -> Any:
    """The same with lists for arrays and tuples, and Python's numbers for numpy's."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else value


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; None is left out."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in flat.items():
        section, dot, rest = name.partition(".")
        if dot:
            values.setdefault(section, {})[rest] = value
        else:
            values[name] = value
    return values


def _suffix(path: Path) -> str:
    if path.suffix.lower() not in SUFFIXES:
        raise RecordingError(f"{path}: the name must end in one of {', '.join(SUFFIXES)}")
    return path.suffix.lower()


def _check_size(path: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise RecordingError(f"{path} unpacks to {size} bytes; at most {MAX_BYTES} are read")


def _num_bytes(value: Any, known: dict[int, int]) -> int:
    """Of the arrays that are or would be made of it; `known`: lists met before, by their id."""
    if isinstance(value, np.ndarray):
        return value.size * value.itemsize
    if not isinstance(value, (Mapping, list)):
        return 8
    if id(value) not in known:
        parts = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = sum(_num_bytes(part, known) for part in parts)
    return known[id(value)]


def _read_npz(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        _check_size(path, sum(info.file_size for info in archive.infolist()))
    with np.load(path, allow_pickle=False) as arrays:
        flat = {name: arrays[name] for name in arrays.files}
    return _nested({name: value if value.ndim else value.item() for name, value in flat.items()})


def _read_pt(path: Path) -> Any:
    import torch

    values = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(values, dict):
        return values
    return {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _write_pt(values: Mapping[str, Any], path: Path) -> None:
    import torch

    tensors = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    torch.save(tensors, path)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return "nothing" if value is None else type(value).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
