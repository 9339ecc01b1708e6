"""Dense projection whose rows do not depend on how many rows share the call.

On a GPU it is the kernel of `gemm.py`. On the CPU, a BLAS picks its own, and with it the order of
the sum over K, by the number of rows: the same row then gets other bits alone than in a batch (seen
in fp32 for 1, 2, 3 and 7 rows on one machine, for nearly every count on another). So a weight only
meets the row counts of TILES, padded with zeros, and of these only those that give a row the bits
that a call of BASE rows gives it on this machine. That is found by trying, once per shape; a
BLAS's choices depend on shapes alone, so it covers every batch.

Weights of few columns get zero columns: for those a BLAS may choose by the address of each row too
(seen in fp32 for up to 11 columns: the same row, another last bit on another place).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.cpu.products import linear_cpu
from moe_serve.kernels.gemm import multiply
from moe_serve.kernels.jit import by_device

# Shapes: T rows (tokens), D input features (K of the GEMM), N output features.

BASE = 16
TILES = (1, 2, 4, 8, BASE, 32, 48, 64, 96, 128, 192, 256)
FEWEST_COLUMNS = 16
# Sums that two orders must share before they count as the same. In bf16 one in hundreds differs.
_NUM_PROBES = 1024
_NUM_COLUMNS = 64

# Of new tensors, in bytes. A BLAS may compute what lies elsewhere in another way.
_ALIGNMENT = 64

_Key = tuple[int, int, int, bool, torch.dtype, torch.device, int]
# What was found: the one thing that outlives a model here, a few dozen booleans.
_agreements: dict[_Key, bool] = {}


def linear_torch(
    x_TD: Tensor, weight_ND: Tensor | PackedWeight, bias_N: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias -> [T, N] in the weight's dtype, which is x's or fp32. T = 0 is fine.

    A row's bits depend on that row and the weight alone, never on T or its place.
    """
    assert isinstance(weight_ND, Tensor)
    x_TD = x_TD.to(weight_ND.dtype)
    num_rows, num_columns = x_TD.shape[0], weight_ND.shape[0]
    if num_rows == 0:
        return x_TD.new_empty((0, num_columns))
    missing = FEWEST_COLUMNS - num_columns
    if missing > 0:
        weight_ND = F.pad(weight_ND, (0, 0, 0, missing))
        bias_N = None if bias_N is None else F.pad(bias_N, (0, missing))
        return linear_torch(x_TD, weight_ND, bias_N)[:, :num_columns].contiguous()
    tile = _tile_for(num_rows, weight_ND, bias_N)
    if tile >= num_rows:
        return _padded(x_TD, weight_ND, bias_N, tile)
    out_TN = x_TD.new_empty((num_rows, num_columns))
    start = 0
    while start < num_rows:
        tile = _tile_for(num_rows - start, weight_ND, bias_N)
        rows = x_TD[start : start + tile]
        out_TN[start : start + tile] = _padded(rows, weight_ND, bias_N, tile)
        start += tile
    return out_TN


def linear_triton(
    x_TD: Tensor, weight_ND: Tensor | PackedWeight, bias_N: Tensor | None = None
) -> Tensor:
    assert isinstance(weight_ND, Tensor)
    bias_1N = None if bias_N is None else bias_N[None]
    return multiply(x_TD, weight_ND[None], bias_EW=bias_1N)


linear = by_device(linear_triton, linear_torch, linear_cpu)


def columns_agree(
    columns_n: Tensor, num_columns: int, in_features: int, dtype: torch.dtype
) -> bool:
    """Whether a weight of these columns alone gives the bits that the weight of all of them would.

    Ranks that each hold a part of a weight's columns then compute what one rank would. Tried on
    this machine's CPU, with the current number of threads, with and without a bias.
    """
    weight_ND = torch.empty(num_columns, in_features, dtype=dtype)
    x, weight = _cancelling(_num_probe_rows(BASE, len(columns_n)), weight_ND)
    own, bias = weight[columns_n], weight.new_zeros(num_columns)
    return torch.equal(linear(x, own), linear(x, weight)[:, columns_n]) and torch.equal(
        linear(x, own, bias[columns_n]), linear(x, weight, bias)[:, columns_n]
    )


def _padded(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, tile: int) -> Tensor:
    """One call of `tile` rows, of which the first T are wanted."""
    num_rows = x_TD.shape[0]
    if num_rows == tile:
        x_TD = x_TD.contiguous()
        is_aligned = x_TD.data_ptr() % _ALIGNMENT == 0
        return F.linear(x_TD if is_aligned else x_TD.clone(), weight_ND, bias_N)
    return F.linear(F.pad(x_TD, (0, 0, 0, tile - num_rows)), weight_ND, bias_N)[:num_rows]


def _tile_for(num_rows: int, weight_ND: Tensor, bias_N: Tensor | None) -> int:
    """The least tile that takes all the rows, or else the largest one: the weight is read least."""
    usable = [tile for tile in TILES if tile >= num_rows] or [TILES[-1]]
    for tile in usable + [tile for tile in reversed(TILES) if tile < usable[0]]:
        if _agrees(tile, weight_ND, bias_N):
            return tile
    raise AssertionError("BASE agrees with itself")


def _agrees(tile: int, weight_ND: Tensor, bias_N: Tensor | None = None) -> bool:
    """Whether calls of `tile` rows and of BASE rows give a row the same bits."""
    if tile == BASE:
        return True
    out_features, in_features = weight_ND.shape
    threads = torch.get_num_threads()
    has_bias = bias_N is not None
    key = (tile, out_features, in_features, has_bias, weight_ND.dtype, weight_ND.device, threads)
    if key not in _agreements:
        x, weight = _cancelling(_num_probe_rows(tile, out_features), weight_ND)
        bias = weight.new_zeros(out_features) if has_bias else None
        tried, wanted = (
            torch.cat([F.linear(rows.clone(), weight, bias) for rows in torch.split(x, size)])
            for size in (tile, BASE)
        )
        _agreements[key] = torch.equal(tried, wanted)
    return _agreements[key]


def _num_probe_rows(tile: int, out_features: int) -> int:
    """Whole tiles, and whole calls of BASE rows, for enough different sums."""
    rows = max(tile, BASE)
    return rows * max(1, _NUM_PROBES // min(_NUM_COLUMNS, out_features) // rows)


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
    weight = torch.randn(min(_NUM_COLUMNS, out_features), half, generator=rng)
    spare = in_features - 2 * half
    x = torch.cat((x, x[:, order], x[:, :spare]), dim=1).to(like_ND)
    weight = torch.cat((weight, -weight[:, order], 0 * weight[:, :spare]), dim=1).to(like_ND)
    return x, weight.repeat(-(-out_features // len(weight)), 1)[:out_features].contiguous()
