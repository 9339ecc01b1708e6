"""Dense projection whose rows do not depend on how many rows share the call.

A BLAS picks its kernel, and with it the order of the sum over K, by the number of rows: the same
row then gets other bits alone than in a batch (seen on CPU in fp32 for 1, 2, 3 and 7 rows on one
machine, for nearly every count on another). So a weight only meets the row counts of TILES, padded
with zeros, and of these only those that give a row the bits that a call of BASE rows gives it on
this machine. That is found by trying, once per shape; a kernel's choices depend on shapes alone, so
it covers every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: T rows (tokens), D input features (K of the GEMM), N output features.

BASE = 16
TILES = (1, 2, 4, 8, BASE, 32, 48, 64, 96, 128, 192, 256)

_Key = tuple[int, int, int, torch.dtype, torch.device, int]
# What was found: the one thing that outlives a model here, a few dozen booleans.
_agreements: dict[_Key, bool] = {}


def linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias -> [T, N] in x's dtype. T = 0 gives an empty result.

    A row's bits depend on that row and the weight alone, never on T or its place.
    """
    num_rows = x_TD.shape[0]
    if num_rows == 0:
        return x_TD.new_empty((0, weight_ND.shape[0]))
    tile = _tile_for(num_rows, weight_ND)
    if tile >= num_rows:
        return _padded(x_TD, weight_ND, bias_N, tile)
    out_TN = x_TD.new_empty((num_rows, weight_ND.shape[0]))
    start = 0
    while start < num_rows:
        tile = _tile_for(num_rows - start, weight_ND)
        rows = x_TD[start : start + tile]
        out_TN[start : start + tile] = _padded(rows, weight_ND, bias_N, tile)
        start += tile
    return out_TN


def columns_agree(
    columns_n: Tensor, num_columns: int, in_features: int, dtype: torch.dtype
) -> bool:
    """Whether a weight of these columns alone gives the bits that the weight of all of them would.

    Ranks that each hold a part of a weight's columns then compute what one rank would. Tried on
    this machine's CPU, with the current number of threads.
    """
    x, weight = _cancelling(BASE, torch.empty(num_columns, in_features, dtype=dtype))
    return torch.equal(
        F.linear(x, weight[columns_n].contiguous()), F.linear(x, weight)[:, columns_n]
    )


def _padded(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, tile: int) -> Tensor:
    """One call of `tile` rows, of which the first T are wanted."""
    num_rows = x_TD.shape[0]
    if num_rows == tile:
        return F.linear(x_TD.contiguous(), weight_ND, bias_N)
    return F.linear(F.pad(x_TD, (0, 0, 0, tile - num_rows)), weight_ND, bias_N)[:num_rows]


def _tile_for(num_rows: int, weight_ND: Tensor) -> int:
    """The least tile that takes all the rows, or else the largest one: the weight is read least."""
    usable = [tile for tile in TILES if tile >= num_rows] or [TILES[-1]]
    for tile in usable + [tile for tile in reversed(TILES) if tile < usable[0]]:
        if _agrees(tile, weight_ND):
            return tile
    raise AssertionError("BASE agrees with itself")


def _agrees(tile: int, weight_ND: Tensor) -> bool:
    """Whether calls of `tile` rows and of BASE rows give a row the same bits."""
    if tile == BASE:
        return True
    out_features, in_features = weight_ND.shape
    threads = torch.get_num_threads()
    key = (tile, out_features, in_features, weight_ND.dtype, weight_ND.device, threads)
    if key not in _agreements:
        x, weight = _cancelling(max(tile, BASE), weight_ND)
        whole = F.linear(x[:tile].contiguous(), weight)
        parts = [F.linear(x[row : row + BASE], weight) for row in range(0, len(x), BASE)]
        _agreements[key] = torch.equal(whole, torch.cat(parts)[:tile])
    return _agreements[key]


def _cancelling(num_rows: int, like_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs whose products cancel: each sum is nothing but the rounding error of its order.

    Ordinary data would not do in bf16, whose rounding at the end hides most such errors; then two
    orders that differ would look alike here and not in a long text.
    """
    out_features, in_features = like_ND.shape
    half = in_features // 2
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(half, generator=rng)
    x = torch.randn(num_rows, half, generator=rng)
    weight = torch.randn(min(64, out_features), half, generator=rng)
    spare = in_features - 2 * half
    x = torch.cat((x, x[:, order], x[:, :spare]), dim=1).to(like_ND)
    weight = torch.cat((weight, -weight[:, order], 0 * weight[:, :spare]), dim=1).to(like_ND)
    return x, weight.repeat(-(-out_features // len(weight)), 1)[:out_features].contiguous()
