"""Weights and rows stored in 8 and 4 bits.

e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; up to 448, no infinity. e2m1: sign, 2 bits
of exponent (bias 1), 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. e8m0: 2^(byte - 127), a scale.
(OCP 8-bit floating point 1.0, OCP microscaling formats 1.0.)
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.jit import by_device, launch, tl, triton

# Shapes: R rows, D columns of rows and weights (K of the product), N weight rows, E experts.

FP8_BLOCK = 128
MX_BLOCK = 32
FP8_MOST = 448.0


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Weight:
    """e4m3 in blocks of 128 x 128 with a scale each, as DeepSeek-V3 has them: value = data * scale.

    `data_END` float8_e4m3fn, D a multiple of 16; `scales` fp32 [E, ceil(N / 128), ceil(D / 128)].
    """

    data_END: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        assert self.data_END.dtype == torch.float8_e4m3fn and self.scales.dtype == torch.float32
        experts, rows, columns = self.data_END.shape
        # What the memory engine reads starts at multiples of 16 bytes.
        assert columns % 16 == 0, f"{columns} columns"
        blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        assert self.scales.shape == (experts, *blocks), f"{self.scales.shape}, not {blocks}"

    @property
    def shape(self) -> torch.Size:
        return self.data_END.shape

    def dequantize(self, expert: int) -> Tensor:
        """[N, D] in fp32."""
        rows, columns = self.data_END.shape[1:]
        scales = self.scales[expert].repeat_interleave(FP8_BLOCK, 0)[:rows]
        scales = scales.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
        return self.data_END[expert].float() * scales


@dataclasses.dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """e2m1 in runs of 32 along D with a scale each, as gpt-oss has them.

    `blocks` uint8 [E, N, D / 32, 16], two values a byte, the first in the low four bits; `scales`
    e8m0 as uint8 [E, N, D / 32]. A scale outside 2^-126 ... 2^125 counts as the nearest of these.
    """

    blocks: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        assert self.blocks.dtype == self.scales.dtype == torch.uint8
        assert self.blocks.shape == (*self.scales.shape, MX_BLOCK // 2), f"{self.blocks.shape}"

    @property
    def shape(self) -> torch.Size:
        """Of the values: [E, N, D]."""
        return torch.Size((*self.scales.shape[:2], self.scales.shape[2] * MX_BLOCK))

    def dequantize(self, expert: int) -> Tensor:
        """[N, D] in fp32."""
        blocks = self.blocks[expert]
        halves = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=blocks.device)
        table = torch.cat((halves, -halves))
        values = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1)
        exponents = self.scales[expert].clamp(1, 252).int() - 127
        return torch.ldexp(values.flatten(-2), exponents[..., None]).flatten(-2)


Weight = Tensor | Fp8Weight | Mxfp4Weight


class Fp8Rows(NamedTuple):
    """`data_RD` float8_e4m3fn; `scales` fp32 [R, ceil(D / 128)]: value = data * scale."""

    data_RD: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """[R, D] in fp32."""
        scales = self.scales.repeat_interleave(FP8_BLOCK, 1)[:, : self.data_RD.shape[1]]
        return self.data_RD.float() * scales


def quantize_rows_torch(x_RD: Tensor) -> Fp8Rows:
    """Each row's blocks of 128 columns to e4m3, the largest of a block to 448.

    A block of zeros has the scale 1. One with a NaN or an infinity has an infinite scale, so that
    no product with it is finite.
    """
    num_rows, width = x_RD.shape
    num_blocks = -(-width // FP8_BLOCK)
    x_RBb = torch.nn.functional.pad(x_RD.float(), (0, num_blocks * FP8_BLOCK - width))
    x_RBb = x_RBb.view(num_rows, num_blocks, FP8_BLOCK)
    most_RB = x_RBb.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(-1)
    scales_RB = torch.where(most_RB == 0, 1.0, most_RB / FP8_MOST)
    data = (x_RBb / scales_RB[..., None]).clamp(-FP8_MOST, FP8_MOST).flatten(1)[:, :width]
    return Fp8Rows(data.contiguous().to(torch.float8_e4m3fn), scales_RB)


def quantize_rows_triton(x_RD: Tensor) -> Fp8Rows:
    num_rows, width = x_RD.shape
    assert x_RD.stride(1) == 1
    num_blocks = triton.cdiv(width, FP8_BLOCK)
    data_RD = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x_RD.device)
    scales = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=x_RD.device)
    rows = 16
    launch(
        _quantize_rows_kernel,
        (triton.cdiv(num_rows, rows), num_blocks),
        x_RD,
        data_RD.view(torch.uint8),
        scales,
        num_rows,
        width,
        num_blocks,
        x_RD.stride(0),
        ROWS=rows,
        BLOCK=FP8_BLOCK,
        num_warps=4,
    )
    return Fp8Rows(data_RD, scales)


quantize_rows = by_device(quantize_rows_triton, quantize_rows_torch)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    x_ptr, data_ptr, scales_ptr, num_rows, width, num_blocks, row_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    most = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    scales = tl.where(most == 0.0, 1.0, tl.div_rn(most, tl.full((ROWS,), 448.0, tl.float32)))
    # Where a scale is infinite, no product is finite, whatever the codes are.
    divisors = tl.where(scales < float("inf"), scales, 1.0)
    codes = encode_e4m3(tl.div_rn(x, tl.broadcast_to(divisors[:, None], (ROWS, BLOCK))))
    tl.store(data_ptr + rows[:, None] * width + columns[None, :], codes, mask=mask)
    tl.store(scales_ptr + rows * num_blocks + block, scales, mask=rows < num_rows)


@triton.jit
def encode_e4m3(x):
    """fp32 -> the byte of the nearest e4m3, ties to even. By integers: not every GPU has the type.

    What is larger than 448 becomes 448. What is not a number stays so.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    # Three bits of mantissa are kept; the exponent's bias goes from 127 to 7.
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Below 2^-6 steps are 2^-9. At 2^14 the steps of fp32 are as long, and it rounds by itself.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, rounded - (120 << 3))
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):
    """Bytes of e4m3 -> fp16, exactly."""
    codes = codes.to(tl.int16)
    # fp16's exponent has the bias 15, not 7: 2^8 makes up for it, also below the least normal one.
    magnitude = codes & 0x7F
    # The one code that is not a number carries into fp16's highest exponent.
    bits = ((codes & 0x80) << 8) | (magnitude << 7) | (((magnitude + 1) & 0x80) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode_e2m1(codes, scales, dtype: tl.constexpr):
    """Low four bits as e2m1, and an e8m0 scale for each, both int32 -> values in `dtype`."""
    magnitude = codes & 7
    # The bias goes from 1 to 127; the one subnormal, 0.5, is 2^-1 and has no mantissa.
    exponent = (scales - 1) << 23
    normal = ((magnitude - (magnitude == 1).to(tl.int32)) << 22) + exponent
    bits = tl.where(magnitude == 0, 0, normal) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True).to(dtype)
