"""Rotary position embedding (arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.row_tiles import elementwise_tiles, power_of_two

# Shapes: T tokens, H heads, h head_dim, r rotary dimensions; i = r / 2 pairs.


def rotary_torch(
    x_THh: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Rotate the first r of h dimensions; the rest passes through -> [T, H, h] in x's dtype.

    Dimension i < r/2 turns with dimension i + r/2 (Hugging Face's layout); `interleaved`: 2i turns
    with 2i + 1 (GPT-J's, DeepSeek's). `cos_Tr`, `sin_Tr` in x's dtype: their second half repeats
    the first, and number i is pair i's in both layouts. Each product is rounded to that dtype.
    Example, r = h = 2, x = (1, 0), angle a: (cos a, sin a).
    """
    rotary_dim = cos_Tr.shape[-1]
    turning = x_THh[..., :rotary_dim]
    cos, sin = cos_Tr[:, None], sin_Tr[:, None]
    if interleaved:
        cos, sin = (part[..., : rotary_dim // 2].repeat_interleave(2, -1) for part in (cos, sin))
        first, second = turning[..., ::2], turning[..., 1::2]
        partner = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        partner = torch.cat((-second, first), dim=-1)
    turned = turning * cos + partner * sin
    if rotary_dim == x_THh.shape[-1]:
        return turned
    return torch.cat((turned, x_THh[..., rotary_dim:]), dim=-1)


def rotary_triton(
    x_THh: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, *, interleaved: bool = False
) -> Tensor:
    num_tokens, num_heads, head_dim = x_THh.shape
    rotary_dim = cos_Tr.shape[1]
    assert cos_Tr.shape == sin_Tr.shape == (num_tokens, rotary_dim)
    assert cos_Tr.dtype == sin_Tr.dtype == x_THh.dtype and rotary_dim % 2 == 0
    assert x_THh.stride(2) == cos_Tr.stride(1) == 1 and cos_Tr.stride() == sin_Tr.stride()
    out_THh = torch.empty(x_THh.shape, dtype=x_THh.dtype, device=x_THh.device)
    tiles = elementwise_tiles(max(rotary_dim // 2, head_dim - rotary_dim))
    launch(
        _rotary_kernel,
        (num_tokens, triton.cdiv(num_heads, tiles.rows)),
        x_THh,
        cos_Tr,
        sin_Tr,
        out_THh,
        num_heads,
        *x_THh.stride()[:2],
        cos_Tr.stride(0),
        HEAD_DIM=head_dim,
        NUM_PAIRS=rotary_dim // 2,
        PAIRS=power_of_two(rotary_dim // 2),
        REST=power_of_two(head_dim - rotary_dim),
        INTERLEAVED=interleaved,
        HEADS=tiles.rows,
        num_warps=tiles.num_warps,
    )
    return out_THh


rotary = by_device(rotary_triton, rotary_torch)


@triton.jit
def turn(first, second, cos, sin, dtype: tl.constexpr):
    """Pairs in fp32, rounded to `dtype` where the twin rounds."""
    one = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    other = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return one.to(dtype), other.to(dtype)


@triton.jit
def _rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    x_token,
    x_head,
    angle_token,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = (heads < num_heads)[:, None]
    x_at = x_ptr + token * x_token + heads[:, None] * x_head
    out_at = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM

    pairs = tl.arange(0, PAIRS)
    is_pair = pairs < NUM_PAIRS
    mask = is_head & is_pair[None, :]
    first_at = (2 * pairs if INTERLEAVED else pairs)[None, :]
    second_at = first_at + (1 if INTERLEAVED else NUM_PAIRS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    angle_at = token * angle_token + pairs
    cos = tl.load(cos_ptr + angle_at, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle_at, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    first = tl.load(x_at + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + second_at, mask=mask, other=0.0).to(tl.float32)
    first, second = turn(first, second, cos, sin, dtype)
    tl.store(out_at + first_at, first, mask=mask)
    tl.store(out_at + second_at, second, mask=mask)

    if HEAD_DIM > 2 * NUM_PAIRS:
        rest = 2 * NUM_PAIRS + tl.arange(0, REST)
        mask = is_head & (rest < HEAD_DIM)[None, :]
        tl.store(out_at + rest[None, :], tl.load(x_at + rest[None, :], mask=mask), mask=mask)
