"""The rows that experts compute, in the order of a permutation."""

from __future__ import annotations

from torch import Tensor

from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.row_tiles import elementwise_tiles

# Shapes: T tokens, K top-k, D model, R rows.


def take_rows_torch(x_TD: Tensor, order_R: Tensor, top_k: int) -> Tensor:
    """Row r is that of the token of pair `order_R[r]` (see `Permutation`) -> [R, D]."""
    return x_TD.index_select(0, order_R // top_k)


def take_rows_triton(x_TD: Tensor, order_R: Tensor, top_k: int) -> Tensor:
    num_rows, width = order_R.numel(), x_TD.shape[1]
    assert x_TD.stride(1) == 1 and order_R.is_contiguous()
    out_RD = x_TD.new_empty(num_rows, width)
    tiles = elementwise_tiles(width)
    launch(
        _take_rows_kernel,
        (num_rows, triton.cdiv(width, tiles.columns)),
        x_TD,
        order_R,
        out_RD,
        width,
        x_TD.stride(0),
        TOP_K=top_k,
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
    return out_RD


take_rows = by_device(take_rows_triton, take_rows_torch)


@triton.jit
def _take_rows_kernel(
    x_ptr, order_ptr, out_ptr, width, x_stride, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(order_ptr + row) // TOP_K
    x = tl.load(x_ptr + token * x_stride + columns, mask=columns < width)
    tl.store(out_ptr + row * width + columns, x, mask=columns < width)
