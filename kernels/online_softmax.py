"""The running softmax of rows over their keys, inside a kernel, and how two of them become one.

A state is three fp32 tiles: the largest score so far times log2(e), the sum of weights, and the
weighted sum of values, both relative to that largest score. Keys that a row may not see leave its
state as it was, and merging with a state of no keys does too: both are exact.
"""

from __future__ import annotations

from moe_serve.kernels.jit import tl, triton
from moe_serve.kernels.quantization import decode_e4m3

# Shapes: R rows of a product, K keys of a tile, C columns of a head, padded to a power of two.


@triton.jit
def no_keys(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Finite, so that no inf - inf is ever computed.
    maximum = tl.full((ROWS,), -1e30, tl.float32)
    return maximum, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def nothing_but_sinks(sinks_ptr, heads, valid, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where rows begin: a sink counts like a key without a value. None: there are no sinks."""
    maximum, total, values = no_keys(ROWS, COLUMNS)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=valid, other=0.0).to(tl.float32)
        maximum = sinks * 1.4426950408889634
        total += 1.0
    return maximum, total, values


@triton.jit
def merge(maximum, total, values, next_maximum, next_total, next_values):
    most = tl.maximum(maximum, next_maximum)
    keep = tl.exp2(maximum - most)
    take = tl.exp2(next_maximum - most)
    total = total * keep + next_total * take
    values = values * keep[:, None] + next_values * take[:, None]
    return most, total, values


@triton.jit
def attended(total, values, value_scale):
    return values / total[:, None] * value_scale


@triton.jit
def add_keys(
    maximum, total, values, q, k, v, first_scale, scale, positions, start, is_edge,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One tile: q [R, C], k and v [K, C] of the positions from `start` on.

    `is_edge`: some row may not see all of them.
    `scale` turns a score into powers of two. With a soft cap, `first_scale` does so for the tanh.
    """
    k = _numbers(k, q.dtype)
    v = _numbers(v, q.dtype)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = 1.0 - 2.0 / (tl.exp2(scores * first_scale) + 1.0)
    if is_edge:
        keys = start + tl.arange(0, k.shape[0])
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    most = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    keep = tl.exp2(maximum - most)
    weights = tl.exp2(tl.fma(scores, scale, -most[:, None]))
    total = total * keep + tl.sum(weights, axis=1)
    values = values * keep[:, None]
    values = tl.dot(weights.to(q.dtype), v, values, input_precision="ieee")
    return most, total, values


@triton.jit
def _numbers(x, dtype: tl.constexpr):
    """Bytes are e4m3, for GPUs without the type."""
    if x.dtype == tl.uint8:
        x = decode_e4m3(x)
    return x.to(dtype)
