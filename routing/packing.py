"""Several columns of a row as one run of bytes, so that one message carries them all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Shapes: T rows, B bytes of a packed row.

# Rows and parts start where their dtype can be read in place.
_ALIGNMENT = 8


def pack(*parts: Tensor) -> Tensor:
    """[T, n] tensors of any dtypes -> their bytes side by side, uint8 [T, B]."""
    starts, row_bytes = _starts([(part.shape[1], part.dtype) for part in parts])
    shape = (parts[0].shape[0], row_bytes)
    packed_TB = torch.zeros(shape, dtype=torch.uint8, device=parts[0].device)
    for start, part in zip(starts, parts, strict=True):
        _column(packed_TB, start, part.shape[1], part.dtype).copy_(part)
    return packed_TB


def unpack(packed_TB: Tensor, *parts: tuple[int, torch.dtype]) -> list[Tensor]:
    """What `pack` was given, as views, by the width and dtype of each part."""
    starts, row_bytes = _starts(parts)
    assert packed_TB.shape[1] == row_bytes
    return [_column(packed_TB, start, *part) for start, part in zip(starts, parts, strict=True)]


def _starts(parts: Iterable[tuple[int, torch.dtype]]) -> tuple[list[int], int]:
    """Where each part begins, and the bytes of a row."""
    starts, end = [], 0
    for width, dtype in parts:
        starts.append(_round_up(end, dtype.itemsize))
        end = starts[-1] + width * dtype.itemsize
    return starts, _round_up(end, _ALIGNMENT)


def _column(packed_TB: Tensor, start: int, width: int, dtype: torch.dtype) -> Tensor:
    return packed_TB[:, start : start + width * dtype.itemsize].view(dtype)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
