"""Root-mean-square norm (Zhang and Sennrich, 2019), alone or after a residual addition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.cpu.rows import norm_rows_cpu
from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.row_tiles import whole_row_tiles

# Shapes: D features; any leading ones.

MAX_SIZE = 16384


class AddedNorm(NamedTuple):
    """`total`: x + y in their dtype. `normed`: `rms_norm` of it."""

    total: Tensor
    normed: Tensor


def rms_norm_torch(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension -> x's shape and dtype.

    The statistics are fp32; the weight multiplies after the cast back, as transformers does.
    On a GPU rows may lie apart, as heads in a matrix of queries, keys and values do, and D is at
    most 16384.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight_D * (x32 * scale).to(x.dtype)


def add_rms_norm_torch(x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> AddedNorm:
    """x + y, rounded to their dtype, and its norm. `x` and `y` have one shape and dtype."""
    total = x + y
    return AddedNorm(total, rms_norm_torch(total, weight_D, eps))


def rms_norm_triton(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight_D, eps).normed


def add_rms_norm_triton(x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> AddedNorm:
    assert x.shape == y.shape and x.dtype == y.dtype
    return _launch(x, y, weight_D, eps)


def rms_norm_cpu(x: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
    found = norm_rows_cpu(x, None, weight_D, eps)
    return None if found is None else found[1]


def add_rms_norm_cpu(x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> AddedNorm | None:
    found = norm_rows_cpu(x, y, weight_D, eps)
    return None if found is None else AddedNorm(*found)


rms_norm = by_device(rms_norm_triton, rms_norm_torch, rms_norm_cpu)
add_rms_norm = by_device(add_rms_norm_triton, add_rms_norm_torch, add_rms_norm_cpu)


def _launch(x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float) -> AddedNorm:
    size = x.shape[-1]
    assert weight_D.shape == (size,) and size <= MAX_SIZE
    x_OID = _rows(x)
    y_OID = x_OID if y is None else _rows(y)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = normed if y is None else torch.empty_like(normed)
    num_rows = x_OID.shape[0] * x_OID.shape[1]
    tiles = whole_row_tiles(size)
    launch(
        _rms_norm_kernel,
        (triton.cdiv(num_rows, tiles.rows),),
        x_OID,
        y_OID,
        weight_D.contiguous(),
        total,
        normed,
        num_rows,
        x_OID.shape[1],
        *x_OID.stride()[:2],
        *y_OID.stride()[:2],
        eps,
        SIZE=size,
        HAS_Y=y is not None,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
    return AddedNorm(total, normed)


def _rows(x: Tensor) -> Tensor:
    """[outer, inner, D] with D contiguous: rows that lie evenly apart are not copied."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.ndim == 3:
        return x
    return x.reshape(-1, 1, x.shape[-1])


# Not compiled anew for one row, or sixteen.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    num_rows,
    num_inner,
    x_outer,
    x_inner,
    y_outer,
    y_inner,
    eps,
    SIZE: tl.constexpr,
    HAS_Y: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    outer, inner = rows // num_inner, rows % num_inner
    x_at = (outer * x_outer + inner * x_inner)[:, None] + columns[None, :]
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0)
    out_at = rows[:, None] * SIZE + columns[None, :]
    if HAS_Y:
        y_at = (outer * y_outer + inner * y_inner)[:, None] + columns[None, :]
        y = tl.load(y_ptr + y_at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + out_at, x, mask=mask)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / SIZE + eps)
    normed = (x32 * scale[:, None]).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    result = (normed * weight[None, :]).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + out_at, result, mask=mask)
