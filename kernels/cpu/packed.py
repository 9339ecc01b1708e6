"""Weights in the order in which the CPU kernels read them (native/gemm.h)."""

from __future__ import annotations

import ctypes
import dataclasses

import torch
from torch import Tensor

from moe_serve.kernels.cpu.calls import DTYPES, WeightFields
from moe_serve.kernels.cpu.library import Library

# Shapes: E experts, N rows of a weight (columns of the product), K columns.

# Repacked at once: of these a copy exists meanwhile.
_BYTES_AT_ONCE = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeight:
    """[N, K] or [E, N, K], the elements of each matrix in another order in the same memory.

    `is_paired`: the first half of N are gates, and the kernels multiply each with the up that
    stands N / 2 below it.
    """

    data: Tensor
    is_paired: bool = False
    # Looked up at every call.
    fields: WeightFields = dataclasses.field(init=False, repr=False, compare=False)
    type_code: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", self._fields())
        object.__setattr__(self, "type_code", DTYPES[self.dtype])

    @classmethod
    def pack(cls, weight: Tensor, library: Library, *, is_paired: bool = False) -> PackedWeight:
        """In place: `weight` holds the packed order afterwards. See `can_pack`."""
        assert can_pack(weight) and not (is_paired and weight.shape[-2] % 2)
        _move(weight, library, is_paired=is_paired, unpack=False)
        return cls(weight, is_paired)

    def unpacked(self, library: Library) -> Tensor:
        """A copy in the usual order."""
        weight = self.data.clone()
        _move(weight, library, is_paired=self.is_paired, unpack=True)
        return weight

    def _fields(self) -> WeightFields:
        *experts, rows, columns = self.shape
        return self.data.data_ptr(), experts[0] if experts else 1, rows, columns, 0, 0

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def memory_of(weight: Tensor | PackedWeight) -> Tensor:
    return weight.data if isinstance(weight, PackedWeight) else weight.detach()


def can_pack(weight: Tensor) -> bool:
    """Two bf16 of a row always stand together."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.is_contiguous()
        and weight.shape[-1] % (4 // weight.element_size()) == 0
        and weight.numel() > 0
    )


def _move(weight: Tensor, library: Library, *, is_paired: bool, unpack: bool) -> None:
    rows, columns = weight.shape[-2:]
    steps = columns * weight.element_size() // 4
    matrices = weight.view(-1, rows, columns)
    number = max(1, _BYTES_AT_ONCE // matrices[0].nbytes)
    # Fresh memory for each part would cost more than the packing.
    scratch = torch.empty_like(matrices[:number])
    for first in range(0, len(matrices), number):
        part = matrices[first : first + number]
        before = scratch[: len(part)].copy_(part)
        library.kernels.moe_serve_pack(
            ctypes.c_void_p(before.data_ptr()), ctypes.c_void_p(part.data_ptr()),
            ctypes.c_int64(len(part)), ctypes.c_int64(rows), ctypes.c_int64(steps),
            int(is_paired), int(unpack), library.num_threads,
        )  # fmt: skip
