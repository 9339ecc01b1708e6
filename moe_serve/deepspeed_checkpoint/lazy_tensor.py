"""Tensors that lie in mapped files, whole or in pieces, until a part of one is read."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_serve.errors import CheckpointError
from moe_serve.parallel.shard import Span

Shape = tuple[int, ...]
# A range per dimension.
Box = tuple[Span, ...]


class LazyTensor(Protocol):
    """`file`: the first that holds some of it."""

    @property
    def file(self) -> Path: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box) -> Tensor:
        """A part; its memory may be the mapped file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that a file holds as it is."""

    file: Path
    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> Tensor:
        return self.tensor[tuple(slice(*span) for span in box)]


class FlatVector:
    """Vectors one after the other, as if they were one."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)
        self._ends = list(itertools.accumulate(part.numel() for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def views(self, start: int, stop: int) -> Iterator[Tensor]:
        """[start, stop), each piece where it lies."""
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            part, end = self.parts[index], self._ends[index]
            first = end - part.numel()
            piece = part[start - first : min(stop, end) - first]
            if piece.numel():
                yield piece
            start, index = min(stop, end), index + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensor:
    """A tensor whose elements, row by row, are in turn `piece` of each vector, from `start` on.

    Example: shape [3, 2], two vectors, start 4, piece 3: elements 0 to 2 are vectors[0][4:7] and
    3 to 5 are vectors[1][4:7].
    """

    file: Path
    vectors: tuple[FlatVector, ...]
    start: int
    piece: int
    shape: Shape
    dtype: torch.dtype

    def read(self, box: Box) -> Tensor:
        # Shapes: the box is some rows (first dimension) of `inner` elements each.
        rows, others = box[0], box[1:]
        inner = math.prod(self.shape[1:])
        views = list(self._views(rows.start * inner, rows.stop * inner))
        is_stack = len(self.shape) > 2 and others[0].size != self.shape[1]
        if len(views) > 1 and is_stack:
            return self._read_stack(box)
        flat = views[0] if len(views) == 1 else torch.cat(views or [torch.empty(0)])
        whole = flat.view(rows.size, *self.shape[1:])
        return whole[(slice(None), *(slice(*span) for span in others))]

    def _read_stack(self, box: Box) -> Tensor:
        """Matrix by matrix, so that rows outside the box are not copied."""
        count, inner = self.shape[1], math.prod(self.shape[2:])
        out = torch.empty([span.size for span in box], dtype=self.dtype)
        columns = tuple(slice(*span) for span in box[2:])
        for index, matrix in enumerate(range(*box[0])):
            first = matrix * count
            begin, end = (first + row for row in box[1])
            views = list(self._views(begin * inner, end * inner))
            flat = views[0] if len(views) == 1 else torch.cat(views or [torch.empty(0)])
            out[index] = flat.view(box[1].size, *self.shape[2:])[(slice(None), *columns)]
        return out

    def _views(self, start: int, stop: int) -> Iterator[Tensor]:
        while start < stop:
            turn, offset = divmod(start, self.piece)
            end = min(stop, (turn + 1) * self.piece)
            begin = self.start + offset
            yield from self.vectors[turn].views(begin, begin + end - start)
            start = end


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTensor:
    """Tensors side by side along `dim`, all of one shape."""

    parts: tuple[LazyTensor, ...]
    dim: int

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def shape(self) -> Shape:
        sizes = list(self.parts[0].shape)
        sizes[self.dim] *= len(self.parts)
        return tuple(sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, box: Box) -> Tensor:
        size, wanted = self.parts[0].shape[self.dim], box[self.dim]
        found = []
        for index, part in enumerate(self.parts):
            own = [min(max(bound - index * size, 0), size) for bound in wanted]
            # All of an empty part are empty; one has the other sizes.
            if own[0] < own[1] or index == 0:
                found.append(part.read((*box[: self.dim], Span(*own), *box[self.dim + 1 :])))
        return found[0] if len(found) == 1 else torch.cat(found, dim=self.dim)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgreedTensor:
    """One tensor of which several files hold a copy; what is read of it is the same in all."""

    name: str
    copies: tuple[LazyTensor, ...]

    @property
    def file(self) -> Path:
        return self.copies[0].file

    @property
    def shape(self) -> Shape:
        return self.copies[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.copies[0].dtype

    def read(self, box: Box) -> Tensor:
        first = self.copies[0].read(box)
        for copy in self.copies[1:]:
            if not _same_bits(first, copy.read(box)):
                raise CheckpointError(
                    f"{copy.file}: tensor {self.name} of shape {list(self.shape)} is whole, but "
                    f"has other values than in {self.file.name}; copies must be equal bit by bit"
                )
        return first


def _same_bits(one: Tensor, other: Tensor) -> bool:
    a, b = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    return torch.equal(a, b)
