"""Dense projection whose rows do not depend on how many rows share the call.

A BLAS picks its kernel, and with it the order of the sum over K, by the number of rows: the same
row then gets other bits alone than in a batch (seen on CPU in fp32 for 1, 2, 3 and 7 rows on one
machine, for nearly every count on another). So a weight only ever meets two row counts: tiles of
`SMALL` rows, zero-padded, and where this machine gives a row the same bits in a call of `LARGE`
rows (checked once per shape, on random data), tiles of `LARGE` rows. A kernel's choices depend on
shapes alone, so that check covers every batch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: T rows (tokens), D input features (K of the GEMM), N output features.

SMALL = 16
LARGE = 256


def linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias -> [T, N] in x's dtype. T = 0 gives an empty result.

    A row's bits depend on that row and the weight alone, never on T or its place.
    """
    num_rows, out_features = x_TD.shape[0], weight_ND.shape[0]
    if num_rows == 0:
        return x_TD.new_empty((0, out_features))
    if num_rows == SMALL:
        return F.linear(x_TD.contiguous(), weight_ND, bias_N)
    large = LARGE if num_rows >= LARGE and _large_agrees_with_small(*_key(weight_ND)) else SMALL
    out_TN = x_TD.new_empty((num_rows, out_features))
    start = _run_tiles(x_TD, weight_ND, bias_N, out_TN, 0, large)
    start = _run_tiles(x_TD, weight_ND, bias_N, out_TN, start, SMALL)
    if start < num_rows:
        rest = num_rows - start
        padded = F.pad(x_TD[start:], (0, 0, 0, SMALL - rest))
        out_TN[start:] = F.linear(padded, weight_ND, bias_N)[:rest]
    return out_TN


def _run_tiles(
    x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, out_TN: Tensor, start: int, tile: int
) -> int:
    """Compute whole tiles of `tile` rows from `start` on; return the first row left over."""
    stop = start + (x_TD.shape[0] - start) // tile * tile
    for row in range(start, stop, tile):
        out_TN[row : row + tile] = F.linear(x_TD[row : row + tile], weight_ND, bias_N)
    return stop


def _key(weight_ND: Tensor) -> tuple[int, int, torch.dtype, str, int]:
    out_features, in_features = weight_ND.shape
    threads = torch.get_num_threads()
    return out_features, in_features, weight_ND.dtype, weight_ND.device.type, threads


@functools.cache
def _large_agrees_with_small(
    out_features: int, in_features: int, dtype: torch.dtype, device: str, threads: int
) -> bool:
    """Whether a call of LARGE rows gives each row the bits that a call of SMALL rows gives."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(LARGE, in_features, generator=rng).to(device, dtype)
    weight = torch.randn(out_features, in_features, generator=rng).to(device, dtype)
    large = F.linear(x, weight)
    small = [F.linear(x[row : row + SMALL], weight) for row in range(0, LARGE, SMALL)]
    return torch.equal(large, torch.cat(small))
