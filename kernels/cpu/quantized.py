"""Weights of 8 or 4 bits, as the CPU kernels read them (native/quantized.h)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moe_serve.kernels.cpu.calls import DTYPES, QuantizeCall, WeightFields, call
from moe_serve.kernels.cpu.library import Library
from moe_serve.kernels.cpu.memory import prefer_huge_pages
from moe_serve.kernels.cpu.packed import PackedWeight

# Shapes: E experts, N rows of a weight (columns of the product), K columns, P columns of a block.

_BLOCK, _VECTOR = 64, 16
# Columns that always stand together.
COLUMNS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """`bits`: 8, with a scale for each row of a weight, and 0 in the middle; or 4, with a scale and
    a zero for each `group` of columns. Rows that are multiplied get 8 bits, with a scale for each
    `group`. `group`: a multiple of 8.
    """

    bits: int
    group: int

    def num_bytes(self, rows: int, columns: int) -> int:
        """Of one matrix, whose blocks are whole vectors wide."""
        padded = -(-rows // _VECTOR) * _VECTOR
        if self.bits == 8:
            return padded * (columns + 4)
        return padded * (columns // 2 + 3 * -(-columns // self.group))


INT8 = Scheme(8, 128)
INT4 = Scheme(4, 128)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight(PackedWeight):
    """`data` uint8: [bytes] of a matrix, or [E, bytes] of one for each expert.

    `dtype` is that of rows and results.
    """

    scheme: Scheme
    values_shape: torch.Size
    values_dtype: torch.dtype

    @classmethod
    def quantize(
        cls, weight: Tensor, scheme: Scheme, library: Library, *, is_paired: bool = False
    ) -> QuantizedWeight:
        """Rounded to nearest; `weight` stays as it is. See `can_quantize`."""
        assert can_quantize(weight) and not (is_paired and weight.shape[-2] % 2)
        *experts, rows, columns = weight.shape
        data = torch.empty(*experts, scheme.num_bytes(rows, columns), dtype=torch.uint8)
        prefer_huge_pages(data).zero_()
        arguments = QuantizeCall(
            weight.data_ptr(), data.data_ptr(), experts[0] if experts else 1, rows, columns,
            DTYPES[weight.dtype], scheme.bits, scheme.group, is_paired, library.num_threads,
        )  # fmt: skip
        call(library.kernels.moe_serve_quantize, arguments)
        return cls(
            data, is_paired, scheme=scheme, values_shape=weight.shape, values_dtype=weight.dtype
        )

    @property
    def shape(self) -> torch.Size:
        return self.values_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values_dtype

    def _fields(self) -> WeightFields:
        *experts, rows, columns = self.shape
        number, scheme = experts[0] if experts else 1, self.scheme
        return self.data.data_ptr(), number, rows, columns, scheme.bits, scheme.group

    def unpacked(self, library: Library) -> Tensor:
        return self.dequantize().to(self.dtype)

    def dequantize(self) -> Tensor:
        """The values in fp32, in the usual order."""
        rows, columns = self.shape[-2:]
        matrices = self.data.view(-1, self.data.shape[-1])
        values = torch.stack([self._matrix(data, rows, columns) for data in matrices])
        return values.view(self.shape)

    def _matrix(self, data: Tensor, rows: int, columns: int) -> Tensor:
        values = torch.empty(rows, columns)
        start = 0
        for first in range(0, rows, _BLOCK):
            width = min(_BLOCK, rows - first)
            stop = start + self.scheme.num_bytes(width, columns)
            block = data[start:stop]
            unpack = _unpack_8 if self.scheme.bits == 8 else self._unpack_4
            values[self._rows_of(first, width)] = unpack(block, columns)[:width]
            start = stop
        return values

    def _rows_of(self, first: int, width: int) -> Tensor:
        if not self.is_paired:
            return torch.arange(first, first + width)
        gates = torch.arange(first // 2, first // 2 + width // 2)
        return torch.cat((gates, gates + self.shape[-2] // 2))

    def _unpack_4(self, block: Tensor, columns: int) -> Tensor:
        padded = len(block) // self.scheme.num_bytes(1, columns) * _VECTOR
        groups, start = [], 0
        for first in range(0, columns, self.scheme.group):
            length = min(self.scheme.group, columns - first)
            sizes = (2 * padded, padded, padded * length // 2)
            scales, zeros, codes = block[start : start + sum(sizes)].clone().split(sizes)
            quads = codes.view(-1, padded, 4)
            values = torch.stack((quads & 15, quads >> 4), dim=1).permute(2, 0, 1, 3)
            centred = values.reshape(padded, length).float() - zeros.float()[:, None]
            groups.append(centred * scales.view(torch.float16).float()[:, None])
            start += sum(sizes)
        return torch.cat(groups, dim=1)


def _unpack_8(block: Tensor, columns: int) -> Tensor:
    padded = len(block) // (columns + 4)
    scales, codes = block.clone().split((4 * padded, padded * columns))
    values = codes.view(-1, padded, 4).transpose(0, 1).reshape(padded, columns)
    result: Tensor = (values.float() - 128) * scales.view(torch.float32)[:, None]
    return result


def can_quantize(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.is_contiguous()
        and weight.shape[-1] % COLUMNS == 0
        and weight.numel() > 0
    )
