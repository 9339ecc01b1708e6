"""Rotation in both layouts, of all or a part of the dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.rotary import rotary_torch, rotary_triton

# Shapes: T tokens, H heads, h head_dim, r rotary dimensions.


def angles(num_tokens: int, rotary_dim: int, device: torch.device) -> Tensor:
    return 6 * torch.rand(num_tokens, rotary_dim // 2, device=device).repeat(1, 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (24, 24), (40, 12), (128, 64)])
def test_a_pair_turns_as_a_complex_number_does(
    device: torch.device, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    torch.manual_seed(0)
    x_THh = torch.randn(17, 3, head_dim, device=device)
    angles_Tr = angles(17, rotary_dim, device)
    order = torch.arange(rotary_dim)
    order = order.view(-1, 2).T if interleaved else order.view(2, -1)
    first, second = (x_THh[..., part].double() for part in order)
    angle = angles_Tr[:, None, : rotary_dim // 2].double()
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    expected = x_THh.clone()
    expected[..., order[0]], expected[..., order[1]] = turned.real.float(), turned.imag.float()
    for op in (rotary_triton, rotary_torch):
        out_THh = op(x_THh, angles_Tr.cos(), angles_Tr.sin(), interleaved=interleaved)
        torch.testing.assert_close(out_THh, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_kernel_rounds_as_its_twin(
    device: torch.device, num_tokens: int, dtype: torch.dtype, interleaved: bool
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(num_tokens, 30 * 48, device=device).to(dtype)
    cos_Tr, sin_Tr = (f(angles(num_tokens, 32, device)).to(dtype) for f in (torch.cos, torch.sin))
    for start, num_heads in ((0, 20), (20, 5), (29, 1)):
        x_THh = qkv[:, start * 48 : (start + num_heads) * 48].unflatten(-1, (-1, 48))
        out_THh = rotary_triton(x_THh, cos_Tr, sin_Tr, interleaved=interleaved)
        expected = rotary_torch(x_THh, cos_Tr, sin_Tr, interleaved=interleaved)
        assert out_THh.is_contiguous() and torch.equal(out_THh, expected)


def test_example(device: torch.device) -> None:
    x_THh = torch.tensor([[[1.0, 0.0]]], device=device)
    angle = torch.full((1, 2), 0.3, device=device)
    for op in (rotary_triton, rotary_torch):
        out = op(x_THh, angle.cos(), angle.sin()).flatten().tolist()
        assert out == pytest.approx([math.cos(0.3), math.sin(0.3)])
