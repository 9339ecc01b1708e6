"""Paged attention. Declines, by None, what it has no kernel for."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.cpu.calls import DTYPES, AttentionCall, call
from moe_serve.kernels.cpu.library import active

# Shapes: T tokens, H heads, N kv heads, h head_dim, B blocks, s slots of a block.

# As in native/key_tiles.h.
_MOST_HEAD_DIM = 256
# Of a vector of bf16; the head's dimensions fill whole ones.
_LANES = 32
# More than any context has.
_NO_WINDOW = 1 << 40


def paged_attention_cpu(
    q_THh: Tensor,
    kv: LayerKV,
    context: StepContext,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor | None:
    library, dtype = active(), q_THh.dtype
    if library is None or dtype not in DTYPES or sinks_H is not None or soft_cap is not None:
        return None
    keys, values, tables_SB = kv.keys_BsNh, kv.values_BsNh, context.block_tables_SB
    _, num_heads, head_dim = q_THh.shape
    if (
        head_dim % _LANES
        or head_dim > _MOST_HEAD_DIM
        or keys.dtype != dtype
        or values.dtype != dtype
        or not (keys.is_contiguous() and values.is_contiguous())
        or q_THh.stride()[1:] != (head_dim, 1)
        or tables_SB.stride(1) != 1
    ):
        return None
    out_THh = torch.empty(q_THh.shape, dtype=dtype)
    starts, lens = context.host_spans
    arguments = AttentionCall(
        q_THh.data_ptr(), keys.data_ptr(), values.data_ptr(), tables_SB.data_ptr(),
        starts.data_ptr(), lens.data_ptr(), out_THh.data_ptr(), context.num_sequences,
        tables_SB.stride(0), keys.shape[1], q_THh.stride(0), num_heads, keys.shape[2], head_dim,
        window or _NO_WINDOW, scale * kv.key_scale, kv.value_scale, DTYPES[dtype],
        library.num_threads,
    )  # fmt: skip
    call(library.kernels.moe_serve_attention, arguments)
    return out_THh
