"""Numbers as integers of the same order, so that ties can be broken inside the integer."""

from __future__ import annotations

from moe_serve.kernels.jit import tl, triton


@triton.jit
def ordered_bits(x):
    """int32 that order as fp32 numbers do; both zeros are one number, NaN lies beyond infinity."""
    # Adding zero turns -0.0 into 0.0.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    # Negative floats grow in magnitude with their bits: turn those around.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
