"""Write new keys and values into their slots of the paged pool."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.context import LayerKV
from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.quantization import FP8_MOST, encode_e4m3
from moe_serve.kernels.row_tiles import elementwise_tiles

# Shapes: T tokens, N kv heads, h head_dim, C = N * h columns.


def kv_store_torch(k_TNh: Tensor, v_TNh: Tensor, kv: LayerKV, slots_T: Tensor) -> None:
    """Row t goes to slot `slots_T[t]` = block id * block_size + offset; -1: nowhere.

    Slots are distinct. A pool of e4m3 takes the nearest to x / scale, at most 448 either way.
    """
    if slots_T.numel() and int(slots_T.min()) < 0:
        kept = slots_T >= 0
        k_TNh, v_TNh, slots_T = k_TNh[kept], v_TNh[kept], slots_T[kept]
    for rows, pool, scale in (
        (k_TNh, kv.keys_BsNh, kv.key_scale),
        (v_TNh, kv.values_BsNh, kv.value_scale),
    ):
        if pool.dtype == torch.float8_e4m3fn:
            rows = (rows.float() / scale).clamp(-FP8_MOST, FP8_MOST).to(pool.dtype)
            # Indexing moves bytes; it does not know the type.
            rows, pool = rows.view(torch.uint8), pool.view(torch.uint8)
        pool.flatten(0, 1).index_copy_(0, slots_T, rows.to(pool.dtype))


def kv_store_triton(k_TNh: Tensor, v_TNh: Tensor, kv: LayerKV, slots_T: Tensor) -> None:
    num_tokens, num_heads, head_dim = k_TNh.shape
    assert k_TNh.stride()[1:] == v_TNh.stride()[1:] == (head_dim, 1)
    assert kv.keys_BsNh.is_contiguous() and kv.values_BsNh.is_contiguous()
    is_fp8 = kv.keys_BsNh.dtype == torch.float8_e4m3fn
    pools = [as_bytes(pool) for pool in (kv.keys_BsNh, kv.values_BsNh)]
    num_columns = num_heads * head_dim
    tiles = elementwise_tiles(num_columns)
    launch(
        _kv_store_kernel,
        (triton.cdiv(num_tokens, tiles.rows), triton.cdiv(num_columns, tiles.columns), 2),
        k_TNh,
        v_TNh,
        *pools,
        slots_T,
        num_tokens,
        k_TNh.stride(0),
        v_TNh.stride(0),
        kv.key_scale,
        kv.value_scale,
        NUM_COLUMNS=num_columns,
        IS_FP8=is_fp8,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )


def as_bytes(pool: Tensor) -> Tensor:
    """A pool of e4m3 as kernels that encode or decode it themselves see it; others as they are."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


kv_store = by_device(kv_store_triton, kv_store_torch)


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_store_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, num_tokens, k_stride, v_stride,
    key_scale, value_scale,
    NUM_COLUMNS: tl.constexpr, IS_FP8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _store(
            k_ptr, keys_ptr, slots_ptr, num_tokens, k_stride, key_scale,
            NUM_COLUMNS, IS_FP8, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _store(
            v_ptr, values_ptr, slots_ptr, num_tokens, v_stride, value_scale,
            NUM_COLUMNS, IS_FP8, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _store(
    x_ptr, pool_ptr, slots_ptr, num_tokens, stride, scale,
    NUM_COLUMNS: tl.constexpr, IS_FP8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slots = tl.load(slots_ptr + rows, mask=rows < num_tokens, other=-1).to(tl.int64)
    mask = (slots >= 0)[:, None] & (columns < NUM_COLUMNS)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask)
    x = as_pooled(x, scale, pool_ptr, IS_FP8)
    tl.store(pool_ptr + slots[:, None] * NUM_COLUMNS + columns[None, :], x, mask=mask)


@triton.jit
def as_pooled(x, scale, pool_ptr, IS_FP8: tl.constexpr):
    """Numbers as the pool keeps them; it holds e4m3 as bytes."""
    if IS_FP8:
        x = x.to(tl.float32)
        return encode_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale))
    else:
        return x.to(pool_ptr.dtype.element_ty)
