"""The norm, alone and after an addition, over rows that may lie apart."""

from __future__ import annotations

import pytest
import torch

from moe_serve.kernels.rms_norm import (
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_torch,
    rms_norm_triton,
)

# The interpreter rounds towards zero to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [0, 1, 9])
@pytest.mark.parametrize("size", [1, 13, 128, 1500])
def test_kernels_equal_their_twins(
    device: torch.device, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, num_rows, size, device=device).to(dtype)
    weight_D = torch.randn(size, device=device).to(dtype)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    expected = torch.nn.functional.rms_norm(x.double(), (size,), weight_D.double(), 1e-5)
    for op in (rms_norm_triton, rms_norm_torch):
        torch.testing.assert_close(op(x, weight_D, 1e-5), expected.to(dtype), **tolerance)
    total, normed = add_rms_norm_triton(x, y, weight_D, 1e-5)
    expected_total, expected_normed = add_rms_norm_torch(x, y, weight_D, 1e-5)
    assert torch.equal(expected_total, x + y)
    assert torch.equal(expected_normed, rms_norm_torch(x + y, weight_D, 1e-5))
    torch.testing.assert_close(total, expected_total, **tolerance)
    torch.testing.assert_close(normed, expected_normed, **tolerance)
    # Of the rounded total.
    assert torch.equal(normed, rms_norm_triton(total, weight_D, 1e-5))


def test_heads_inside_a_matrix_are_not_copied(device: torch.device) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(17, 8 * 24, device=device)
    weight_D = torch.randn(24, device=device)
    for start, num_heads in ((0, 4), (4, 2), (7, 1)):
        heads_THh = qkv[:, start * 24 : (start + num_heads) * 24].unflatten(-1, (-1, 24))
        out_THh = rms_norm_triton(heads_THh, weight_D, 1e-6)
        assert out_THh.shape == heads_THh.shape and out_THh.is_contiguous()
        torch.testing.assert_close(out_THh, rms_norm_torch(heads_THh, weight_D, 1e-6))


@pytest.mark.parametrize("size", [60, 1500])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, size: int) -> None:
    torch.manual_seed(0)
    x, weight_D = torch.randn(20, size, device=device), torch.randn(size, device=device)
    whole = rms_norm_triton(x, weight_D, 1e-6)
    for start, stop in ((0, 1), (5, 6), (3, 20)):
        assert torch.equal(rms_norm_triton(x[start:stop], weight_D, 1e-6), whole[start:stop])


def test_the_widest_row(device: torch.device) -> None:
    x, weight_D = torch.randn(2, 16384, device=device), torch.randn(16384, device=device)
    expected = rms_norm_torch(x, weight_D, 1e-6)
    torch.testing.assert_close(rms_norm_triton(x, weight_D, 1e-6), expected)
