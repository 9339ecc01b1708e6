"""One GEMM per expert over rows sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_serve.kernels.linear import linear

# Shapes: R rows sorted by expert, D in, N out, E experts.


def grouped_gemm(x_RD: Tensor, weight_END: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows of expert e times weight_END[e].T -> [R, N].

    `counts` are host integers, one per expert, summing to R. Experts without rows cost nothing.
    A row's bits do not depend on the other rows (see `linear`).
    """
    out_RN = x_RD.new_empty((x_RD.shape[0], weight_END.shape[1]))
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            out_RN[start:stop] = linear(x_RD[start:stop], weight_END[expert])
            start = stop
    return out_RN
