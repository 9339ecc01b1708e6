"""A part of a checkpoint tensor, and the place in this rank's parameters that it fills. Pure.

Our parameters are fused (q, k, v in one matrix; gate and up in one; experts stacked) and hold this
rank's share alone, so one parameter is filled from parts of several tensors:

    rank 1 of 2; 4 heads and 2 KV heads of size 8, D 16

    q_proj [32, 16]  rows 16..32  ->  qkv [32, 16]  rows  0..16
    k_proj [16, 16]  rows  8..16  ->                rows 16..24
    v_proj [16, 16]  rows  8..16  ->                rows 24..32
"""

from __future__ import annotations

import dataclasses
import math

from moe_serve.parallel.shard import Span

Shape = tuple[int, ...]
# A range per dimension.
Box = tuple[Span, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A part of a checkpoint tensor, and the place in a parameter that it fills.

    `part`: a range per dimension of the tensor, as it lies in the checkpoint. `is_transposed`: its
    last two dimensions are swapped there. `place`: ranges of the parameter's first dimensions (the
    rows; or experts, and rows of each); along the others it is filled whole.
    """

    parameter: str
    part: Box
    place: Box
    is_transposed: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> Shape:
        """Of the part, turned as the parameter is."""
        sizes = tuple(span.size for span in self.part)
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.is_transposed else sizes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that the checkpoint must hold, and what this rank takes of it: perhaps nothing.

    `names`: what it may be called, usual name first. `shape`: what it must have there.
    """

    names: tuple[str, ...]
    shape: Shape
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockNames:
    """A block of ours, and what it may be called in the checkpoint."""

    ours: str
    theirs: tuple[str, ...]

    def all(self, name: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{name}" for prefix in self.theirs)
