"""From a projection to what attention reads: norms per head, rotation, and the store in one pass.

Five ops that move few bytes: in a step of a few tokens, launching one costs more than it does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.context import LayerKV
from moe_serve.kernels.cpu.rows import attention_inputs_cpu, projected_inputs_cpu
from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.kv_store import as_bytes, as_pooled, kv_store_torch
from moe_serve.kernels.rms_norm import rms_norm_torch
from moe_serve.kernels.rotary import rotary_torch, turn
from moe_serve.kernels.row_tiles import power_of_two, whole_row_tiles

# Shapes: T tokens, H heads, N kv heads, h head_dim, r rotary dimensions.


class HeadNorms(NamedTuple):
    """RMS norms over each head of queries and of keys."""

    q_weight_h: Tensor
    k_weight_h: Tensor
    eps: float


def attention_inputs_torch(
    q_THh: Tensor,
    k_TNh: Tensor,
    v_TNh: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    kv: LayerKV,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Queries, normalised and turned -> [T, H, h]; keys, likewise, and values go to their slots.

    As `rms_norm`, `rotary` in halves, and `kv_store` one after the other.
    """
    if norms is not None:
        q_THh = rms_norm_torch(q_THh, norms.q_weight_h, norms.eps)
        k_TNh = rms_norm_torch(k_TNh, norms.k_weight_h, norms.eps)
    kv_store_torch(rotary_torch(k_TNh, cos_Tr, sin_Tr), v_TNh, kv, slots_T)
    return rotary_torch(q_THh, cos_Tr, sin_Tr)


def attention_inputs_triton(
    q_THh: Tensor,
    k_TNh: Tensor,
    v_TNh: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    kv: LayerKV,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q_THh.shape
    num_kv_heads, rotary_dim = k_TNh.shape[1], cos_Tr.shape[1]
    assert q_THh.stride(2) == k_TNh.stride(2) == v_TNh.stride(2) == 1
    assert cos_Tr.shape == sin_Tr.shape == (num_tokens, rotary_dim) and rotary_dim % 2 == 0
    assert cos_Tr.stride() == sin_Tr.stride() == (rotary_dim, 1)
    assert cos_Tr.dtype == sin_Tr.dtype == q_THh.dtype == k_TNh.dtype == v_TNh.dtype
    assert kv.keys_BsNh.is_contiguous() and kv.values_BsNh.is_contiguous()
    out_THh = torch.empty(q_THh.shape, dtype=q_THh.dtype, device=q_THh.device)
    is_fp8 = kv.keys_BsNh.dtype == torch.float8_e4m3fn
    pools = [as_bytes(pool) for pool in (kv.keys_BsNh, kv.values_BsNh)]
    tiles = whole_row_tiles(head_dim)
    num_parts = triton.cdiv(num_heads, tiles.rows) + 2 * triton.cdiv(num_kv_heads, tiles.rows)
    launch(
        _attention_inputs_kernel,
        (num_tokens, num_parts),
        # Inputs.
        q_THh,
        k_TNh,
        v_TNh,
        *q_THh.stride()[:2],
        *k_TNh.stride()[:2],
        *v_TNh.stride()[:2],
        cos_Tr,
        sin_Tr,
        None if norms is None else norms.q_weight_h,
        None if norms is None else norms.k_weight_h,
        0.0 if norms is None else norms.eps,
        # Outputs.
        out_THh,
        *pools,
        slots_T,
        kv.key_scale,
        kv.value_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=rotary_dim // 2,
        PAIRS=power_of_two(rotary_dim // 2),
        REST=power_of_two(head_dim - rotary_dim),
        COLUMNS=tiles.columns,
        IS_FP8=is_fp8,
        HEADS=tiles.rows,
        num_warps=tiles.num_warps,
    )
    return out_THh


attention_inputs = by_device(attention_inputs_triton, attention_inputs_torch, attention_inputs_cpu)


def projected_inputs_torch(
    qkv_TC: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    kv: LayerKV,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`attention_inputs` of a projection's columns: all queries, all keys, all values."""
    heads_TXh = qkv_TC.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q_THh, k_TNh, v_TNh = heads_TXh.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return attention_inputs(q_THh, k_TNh, v_TNh, cos_Tr, sin_Tr, kv, slots_T, norms)


# On a GPU it is one launch too: the parts are views.
projected_inputs = by_device(projected_inputs_torch, projected_inputs_torch, projected_inputs_cpu)


@triton.jit
def _attention_inputs_kernel(
    q_ptr, k_ptr, v_ptr, q_token, q_head, k_token, k_head, v_token, v_head,
    cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, eps,
    out_ptr, keys_ptr, values_ptr, slots_ptr, key_scale, value_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr,
    IS_FP8: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < Q_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        _turn_heads(
            q_ptr + token * q_token + heads * q_head, heads < NUM_HEADS,
            cos_ptr + token * NUM_PAIRS * 2, sin_ptr + token * NUM_PAIRS * 2, q_weight_ptr, eps,
            out_ptr + (token * NUM_HEADS + heads) * HEAD_DIM, 1.0,
            HEAD_DIM, NUM_PAIRS, PAIRS, REST, COLUMNS, False,
        )  # fmt: skip
    else:
        # Of padding nothing is stored.
        slot = tl.load(slots_ptr + token).to(tl.int64)
        heads = (part - Q_PARTS) % KV_PARTS * HEADS + tl.arange(0, HEADS)
        # One comparison: Triton's interpreter takes no mask of two of different ranks.
        is_stored = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        to = (slot * NUM_KV_HEADS + heads) * HEAD_DIM
        if part < Q_PARTS + KV_PARTS:
            _turn_heads(
                k_ptr + token * k_token + heads * k_head, is_stored,
                cos_ptr + token * NUM_PAIRS * 2, sin_ptr + token * NUM_PAIRS * 2, k_weight_ptr, eps,
                keys_ptr + to, key_scale,
                HEAD_DIM, NUM_PAIRS, PAIRS, REST, COLUMNS, IS_FP8,
            )  # fmt: skip
        else:
            columns = tl.arange(0, COLUMNS)[None, :]
            mask = is_stored[:, None] & (columns < HEAD_DIM)
            at = v_ptr + token * v_token + heads[:, None] * v_head + columns
            v = as_pooled(tl.load(at, mask=mask), value_scale, values_ptr, IS_FP8)
            tl.store(values_ptr + to[:, None] + columns, v, mask=mask)


@triton.jit
def _turn_heads(
    from_ptrs, is_head, cos_ptr, sin_ptr, weight_ptr, eps, to_ptrs, scale,
    HEAD_DIM: tl.constexpr, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    COLUMNS: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; `from_ptrs` and `to_ptrs`: where each begins."""
    dtype: tl.constexpr = from_ptrs.dtype.element_ty
    root = tl.zeros(from_ptrs.shape, tl.float32)
    if weight_ptr is not None:
        columns = tl.arange(0, COLUMNS)[None, :]
        mask = is_head[:, None] & (columns < HEAD_DIM)
        x = tl.load(from_ptrs[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    pairs = tl.arange(0, PAIRS)
    is_pair = pairs < NUM_PAIRS
    first = _normed(from_ptrs, is_head, pairs, is_pair, weight_ptr, root)
    second = _normed(from_ptrs, is_head, NUM_PAIRS + pairs, is_pair, weight_ptr, root)
    cos = tl.load(cos_ptr + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    first, second = turn(first, second, cos, sin, dtype)
    mask = is_head[:, None] & is_pair[None, :]
    to = to_ptrs[:, None] + pairs[None, :]
    tl.store(to, as_pooled(first, scale, to_ptrs, IS_FP8), mask=mask)
    tl.store(to + NUM_PAIRS, as_pooled(second, scale, to_ptrs, IS_FP8), mask=mask)
    if HEAD_DIM > 2 * NUM_PAIRS:
        rest = 2 * NUM_PAIRS + tl.arange(0, REST)
        is_rest = rest < HEAD_DIM
        x = _normed(from_ptrs, is_head, rest, is_rest, weight_ptr, root).to(dtype)
        mask = is_head[:, None] & is_rest[None, :]
        tl.store(to_ptrs[:, None] + rest[None, :], as_pooled(x, scale, to_ptrs, IS_FP8), mask=mask)


@triton.jit
def _normed(from_ptrs, is_head, columns, is_column, weight_ptr, root):
    """Those columns of the heads in fp32, rounded where the ops one by one would round."""
    dtype: tl.constexpr = from_ptrs.dtype.element_ty
    mask = is_head[:, None] & is_column[None, :]
    x = tl.load(from_ptrs[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        x = (x * root[:, None]).to(dtype).to(tl.float32)
        x = (x * weight[None, :]).to(dtype).to(tl.float32)
    return x
