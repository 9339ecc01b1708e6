"""Norms and what attention reads. Each declines, by None, what it has no kernel for."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.context import LayerKV
from moe_serve.kernels.cpu.calls import DTYPES, AttentionInputsCall, NormCall, address, call
from moe_serve.kernels.cpu.library import active

# Shapes: T tokens, H heads, N kv heads, h head_dim, r rotary dimensions, D features.


def norm_rows_cpu(
    x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """x + y, or x itself without y, and its norm."""
    library, shape, strides, dtype = active(), x.shape, x.stride(), x.dtype
    y_strides = strides if y is None else y.stride()
    if (
        library is None
        or len(shape) != 2
        or dtype not in DTYPES
        or weight_D.dtype is not dtype
        or strides[1] != 1
        or y_strides[1] != 1
    ):
        return None
    out = torch.empty(shape, dtype=dtype)
    total = x if y is None else torch.empty(shape, dtype=dtype)
    arguments = NormCall(
        x.data_ptr(), address(y), weight_D.data_ptr(), total.data_ptr(), out.data_ptr(), *shape,
        strides[0], y_strides[0], eps, DTYPES[dtype], library.num_threads,
    )  # fmt: skip
    call(library.kernels.moe_serve_norm, arguments)
    return total, out


def attention_inputs_cpu(
    q_THh: Tensor,
    k_TNh: Tensor,
    v_TNh: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    kv: LayerKV,
    slots_T: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor | None:
    dtype, head_dim = q_THh.dtype, q_THh.shape[2]
    parts = (q_THh, k_TNh, v_TNh)
    if any(part.stride()[1:] != (head_dim, 1) or part.dtype is not dtype for part in parts):
        return None
    out_THh = torch.empty(q_THh.shape, dtype=dtype)
    pointers = (q_THh.data_ptr(), k_TNh.data_ptr(), v_TNh.data_ptr())
    strides = (q_THh.stride(0), k_TNh.stride(0), v_TNh.stride(0))
    is_done = _run(pointers, strides, k_TNh.shape[1], out_THh, (cos_Tr, sin_Tr), kv, slots_T, norms)
    return out_THh if is_done else None


def projected_inputs_cpu(
    qkv_TC: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    kv: LayerKV,
    slots_T: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor | None:
    (num_tokens, columns), dtype = qkv_TC.shape, qkv_TC.dtype
    stride, inner = qkv_TC.stride()
    if inner != 1:
        return None
    head_dim = columns // (num_heads + 2 * num_kv_heads)
    out_THh = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype)
    start, size = qkv_TC.data_ptr(), head_dim * dtype.itemsize
    keys = start + num_heads * size
    pointers, strides = (start, keys, keys + num_kv_heads * size), (stride, stride, stride)
    is_done = _run(pointers, strides, num_kv_heads, out_THh, (cos_Tr, sin_Tr), kv, slots_T, norms)
    return out_THh if is_done else None


def _run(
    pointers: tuple[int, int, int],
    strides: tuple[int, int, int],
    num_kv_heads: int,
    out_THh: Tensor,
    angles: tuple[Tensor, Tensor],
    kv: LayerKV,
    slots_T: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> bool:
    """Queries, keys and values at `pointers`, their tokens `strides` apart. False: declined."""
    library, dtype = active(), out_THh.dtype
    keys, values, (cos_Tr, sin_Tr) = kv.keys_BsNh, kv.values_BsNh, angles
    if (
        library is None
        or dtype not in DTYPES
        or not dtype is cos_Tr.dtype is sin_Tr.dtype is keys.dtype is values.dtype
        or not (cos_Tr.is_contiguous() and sin_Tr.is_contiguous())
        or not (keys.is_contiguous() and values.is_contiguous())
    ):
        return False
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    num_tokens, num_heads, head_dim = out_THh.shape
    arguments = AttentionInputsCall(
        *pointers, cos_Tr.data_ptr(), sin_Tr.data_ptr(), address(q_weight), address(k_weight),
        slots_T.data_ptr(), out_THh.data_ptr(), keys.data_ptr(), values.data_ptr(), num_tokens,
        *strides, num_heads, num_kv_heads, head_dim, cos_Tr.shape[1], eps, DTYPES[dtype],
        library.num_threads,
    )  # fmt: skip
    call(library.kernels.moe_serve_attention_inputs, arguments)
    return True
