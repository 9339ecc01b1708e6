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
    library = active()
    if (
        library is None
        or x.ndim != 2
        or x.dtype not in DTYPES
        or weight_D.dtype != x.dtype
        or x.stride(1) != 1
        or (y is not None and y.stride(1) != 1)
    ):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x if y is None else torch.empty(x.shape, dtype=x.dtype)
    arguments = NormCall(
        x.data_ptr(), address(y), weight_D.data_ptr(), total.data_ptr(), out.data_ptr(),
        x.shape[0], x.shape[1], x.stride(0), 0 if y is None else y.stride(0), eps, DTYPES[x.dtype],
        library.num_threads,
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
    library, dtype = active(), q_THh.dtype
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THh.shape, k_TNh.shape[1]
    keys, values = kv.keys_BsNh, kv.values_BsNh
    if (
        library is None
        or dtype not in DTYPES
        or any(part.dtype != dtype for part in (k_TNh, v_TNh, cos_Tr, sin_Tr, keys, values))
        or any(part.stride()[1:] != (head_dim, 1) for part in (q_THh, k_TNh, v_TNh))
        or not (cos_Tr.is_contiguous() and sin_Tr.is_contiguous())
        or not (keys.is_contiguous() and values.is_contiguous())
    ):
        return None
    out_THh = torch.empty(q_THh.shape, dtype=dtype)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    arguments = AttentionInputsCall(
        q_THh.data_ptr(), k_TNh.data_ptr(), v_TNh.data_ptr(), cos_Tr.data_ptr(), sin_Tr.data_ptr(),
        address(q_weight), address(k_weight), slots_T.data_ptr(), out_THh.data_ptr(),
        keys.data_ptr(), values.data_ptr(), num_tokens, q_THh.stride(0), k_TNh.stride(0),
        v_TNh.stride(0), num_heads, num_kv_heads, head_dim, cos_Tr.shape[1], eps, DTYPES[dtype],
        library.num_threads,
    )  # fmt: skip
    call(library.kernels.moe_serve_attention_inputs, arguments)
    return out_THh
