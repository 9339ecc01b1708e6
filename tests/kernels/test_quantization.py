"""8-bit and 4-bit numbers against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from moe_serve.kernels.jit import launch, tl, triton
from moe_serve.kernels.quantization import (
    Fp8Weight,
    Mxfp4Weight,
    decode_e2m1,
    decode_e4m3,
    quantize_rows_torch,
    quantize_rows_triton,
)


@triton.jit
def _decode_e4m3_kernel(codes_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, decode_e4m3(tl.load(codes_ptr + at)))


@triton.jit
def _decode_e2m1_kernel(codes_ptr, scales_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    codes, scales = tl.load(codes_ptr + at), tl.load(scales_ptr + at)
    tl.store(out_ptr + at, decode_e2m1(codes, scales, tl.float32))


def test_every_e4m3_is_decoded_exactly(device: torch.device) -> None:
    codes = torch.arange(256, device=device).to(torch.uint8)
    told = torch.empty(256, dtype=torch.float16, device=device)
    launch(_decode_e4m3_kernel, (1,), codes, told, SIZE=256)
    expected = codes.view(torch.float8_e4m3fn).half()
    assert expected.isnan().sum() == 2
    torch.testing.assert_close(told, expected, rtol=0, atol=0, equal_nan=True)


def test_every_e2m1_is_decoded_exactly(device: torch.device) -> None:
    codes = torch.arange(16, dtype=torch.int32, device=device).repeat(4)
    scales = torch.tensor([1, 100, 127, 252], device=device, dtype=torch.int32)
    scales = scales.repeat_interleave(16)
    told = torch.empty(64, device=device)
    launch(_decode_e2m1_kernel, (1,), codes, scales, told, SIZE=64)
    halves = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = halves + [-value for value in halves]
    expected = [
        math.ldexp(values[code], scale - 127)
        for code, scale in zip(codes.tolist(), scales.tolist(), strict=True)
    ]
    # Half of the least scale is below what bf16 keeps in full.
    is_kept = (scales > 1) | (codes & 7 != 1)
    assert torch.equal(told[is_kept], torch.tensor(expected, device=device)[is_kept])


def rows(num_rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Of many magnitudes, with numbers that are subnormal in e4m3, and some zeros."""
    torch.manual_seed(num_rows + width)
    x = torch.randn(num_rows, width) * torch.exp(torch.randn(num_rows, 1))
    x[:, ::7] *= 1e-3
    x[::5, :128] = 0
    return x.to(device)


@pytest.mark.parametrize("width", [13, 128, 300])
@pytest.mark.parametrize("num_rows", [0, 1, 17, 129])
def test_rows_are_quantized_as_the_twin_does(
    num_rows: int, width: int, device: torch.device
) -> None:
    for dtype in (torch.float32, torch.float16):
        x = rows(num_rows, width, device).to(dtype)
        told, expected = quantize_rows_triton(x), quantize_rows_torch(x)
        assert torch.equal(told.scales, expected.scales)
        assert torch.equal(told.data_RD.view(torch.uint8), expected.data_RD.view(torch.uint8))


def test_quantized_rows_are_near_the_rows(device: torch.device) -> None:
    x = rows(40, 300, device)
    told = quantize_rows_torch(x).dequantize()
    blocks = x.split(128, dim=1)
    most = torch.cat([b.abs().amax(1, keepdim=True).expand_as(b) for b in blocks], dim=1)
    # Half a step of three bits of mantissa, or of the subnormal numbers.
    assert ((told - x).abs() <= torch.maximum(x.abs() / 16, most / 448 * 2.0**-10) * 1.001).all()
    assert told[0, :128].eq(0).all()


def test_a_row_is_quantized_alone(device: torch.device) -> None:
    x = rows(40, 200, device)
    whole = quantize_rows_triton(x)
    for row in (0, 7, 39):
        alone = quantize_rows_triton(x[row : row + 1])
        assert torch.equal(alone.dequantize()[0], whole.dequantize()[row])


def test_what_is_not_finite_stays_so(device: torch.device) -> None:
    x = torch.ones(3, 130, device=device)
    x[0, 3], x[1, 3] = float("nan"), float("-inf")
    for quantize in (quantize_rows_triton, quantize_rows_torch):
        scales = quantize(x).scales
        assert scales.isinf().tolist() == [[True, False], [True, False], [False, False]]


def test_fp8_weights_have_a_scale_for_each_block() -> None:
    data = torch.ones(2, 130, 272).to(torch.float8_e4m3fn)
    scales = torch.arange(12.0).view(2, 2, 3)
    value = Fp8Weight(data, scales).dequantize(1)
    assert value.shape == (130, 272)
    assert value[[0, 127, 128]][:, [0, 127, 128, 271]].tolist() == [
        [6, 6, 7, 8],
        [6, 6, 7, 8],
        [9, 9, 10, 11],
    ]


def test_mxfp4_weights_have_the_even_column_in_the_low_bits() -> None:
    blocks = torch.zeros(1, 1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 1, 0] = 0x3 | 0xF << 4
    blocks[0, 0, 1, 15] = 0x2
    weight = Mxfp4Weight(blocks, torch.tensor([[[127, 128]]], dtype=torch.uint8))
    value = weight.dequantize(0)
    assert weight.shape == (1, 1, 64) and value.shape == (1, 64)
    assert value[0, [0, 32, 33, 34, 62, 63]].tolist() == [0, 3, -12, 0, 2, 0]
