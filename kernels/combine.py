"""Weighted sum of what a token's experts gave it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.row_tiles import elementwise_tiles

# Shapes: T tokens, K top-k, D model, R rows.


def weigh_slots_torch(slots_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum over each token's slots -> [T, D] in fp32. `weights_TK` fp32.

    Slots are added one after the other, by (token, slot): the result cannot depend on which
    expert, rank or replica a row came from. A slot of weight 0 adds 0, whatever stands in it: it
    may be memory that nobody wrote.
    """
    if int(weights_TK.count_nonzero()) < weights_TK.numel():
        slots_TKD = slots_TKD.masked_fill((weights_TK == 0)[..., None], 0.0)
    out_TD: Tensor = slots_TKD[:, 0].float() * weights_TK[:, :1]
    for slot in range(1, weights_TK.shape[1]):
        out_TD = out_TD + slots_TKD[:, slot].float() * weights_TK[:, slot : slot + 1]
    return out_TD


def weigh_rows_torch(rows_RD: Tensor, inverse_R: Tensor, weights_TK: Tensor) -> Tensor:
    """The same, where slot k of token t is row `inverse_R[t * K + k]` -> [T, D], rows' dtype."""
    num_tokens, top_k = weights_TK.shape
    slots_TKD = rows_RD.index_select(0, inverse_R).view(num_tokens, top_k, rows_RD.shape[1])
    return weigh_slots_torch(slots_TKD, weights_TK).to(rows_RD.dtype)


def weigh_slots_triton(slots_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    num_tokens, top_k, width = slots_TKD.shape
    assert weights_TK.shape == (num_tokens, top_k)
    out_TD = slots_TKD.new_empty(num_tokens, width, dtype=torch.float32)
    # Between ranks, weights travel as columns of wider rows.
    _launch(slots_TKD, slots_TKD.stride(), None, weights_TK.contiguous(), out_TD)
    return out_TD


def weigh_rows_triton(rows_RD: Tensor, inverse_R: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = rows_RD.new_empty(weights_TK.shape[0], rows_RD.shape[1])
    assert inverse_R.shape == (weights_TK.numel(),) and inverse_R.is_contiguous()
    _launch(rows_RD, (0, *rows_RD.stride()), inverse_R, weights_TK, out_TD)
    return out_TD


weigh_slots = by_device(weigh_slots_triton, weigh_slots_torch)
weigh_rows = by_device(weigh_rows_triton, weigh_rows_torch)


def _launch(
    rows: Tensor,
    strides: tuple[int, ...],
    inverse_R: Tensor | None,
    weights_TK: Tensor,
    out_TD: Tensor,
) -> None:
    """`strides`: between tokens, between rows or slots, and inside one."""
    (num_tokens, top_k), width = weights_TK.shape, out_TD.shape[1]
    assert strides[2] == 1 and weights_TK.is_contiguous() and weights_TK.dtype == torch.float32
    tiles = elementwise_tiles(width)
    launch(
        _combine_kernel,
        (num_tokens, triton.cdiv(width, tiles.columns)),
        rows,
        inverse_R,
        weights_TK,
        out_TD,
        width,
        strides[0],
        strides[1],
        TOP_K=top_k,
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )


@triton.jit
def _combine_kernel(
    rows_ptr,
    inverse_ptr,
    weights_ptr,
    out_ptr,
    width,
    token_stride,
    row_stride,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + slot)
        row = slot
        if inverse_ptr is not None:
            row = tl.load(inverse_ptr + token * TOP_K + slot)
        at = rows_ptr + token * token_stride + row * row_stride + columns
        # Where the weight is 0, nobody need have written the row.
        stop = tl.where(weight == 0.0, 0, width)
        values = tl.load(at, mask=columns < stop, other=0.0).to(tl.float32)
        total = values * weight if slot == 0 else total + values * weight
    tl.store(out_ptr + token * width + columns, total.to(dtype), mask=mask)
