"""Choosing tokens from logits, so that a row never depends on the rows beside it.

Floating-point sums depend on the order of their terms, and that order on the batch. So
likelihoods become integers first, whose sums are exact in any order:

    logits   3.0   1.0   3.0   -inf
    weights  2^60  0.135 * 2^60  2^60  0      exp((logit - max) / temperature), V = 4
    sums     2^60  1.135 * 2^60  2.135 * 2^60  2.135 * 2^60
    u = 0.5 -> target 1.068 * 2^60 -> token 1, the first whose sum exceeds the target

Everything else is elementwise, a maximum, or a sort without ties: equal on every row position.
The exponential of a GPU may differ from a CPU's in its last bit.

S rows, V vocabulary, 1 one value per row.
"""

from __future__ import annotations

import torch

from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.keep_top import STAGES
from moe_serve.kernels.row_tiles import elementwise_tiles, scan_tiles


def weight_bits(vocab_size: int) -> int:
    """Binary logarithm of the likeliest token's weight: V such weights still fit in 62 bits."""
    return 62 - (vocab_size - 1).bit_length()


def fixed_point_weights_torch(
    logits_SV: torch.Tensor, max_S1: torch.Tensor, temperature_S1: torch.Tensor | None = None
) -> torch.Tensor:
    """Likelihoods as int64 [S, V], relative to the likeliest token's `2 ** weight_bits(V)`.

    `logits_SV` fp32; `max_S1` its row maxima, finite. Subtracted before the division, they keep
    any temperature above 0 free of overflow. Rounded down: what is rarer than one in
    `2 ** weight_bits(V)` gets 0. Rows with NaN give arbitrary numbers.
    """
    scaled_SV = logits_SV - max_S1
    if temperature_S1 is not None:
        scaled_SV /= temperature_S1
    return scaled_SV.exp_().mul_(2.0 ** weight_bits(logits_SV.shape[-1])).to(torch.int64)


def keep_min_p(weights_SV: torch.Tensor, min_p_S1: torch.Tensor) -> torch.Tensor:
    """Weights with those below `min_p` times the likeliest token's set to zero. float64 [S, 1]."""
    least_S1 = (min_p_S1 * 2.0 ** weight_bits(weights_SV.shape[-1])).to(torch.int64)
    return torch.where(weights_SV >= least_S1, weights_SV, 0)


def pick_torch(
    weights_SV: torch.Tensor, uniform_S1: torch.Tensor, min_p_S1: torch.Tensor | None = None
) -> torch.Tensor:
    """Token ids int64 [S]: inverse CDF in order of token id at `uniform_S1`, float64 in [0, 1).

    `min_p_S1`: of the weights that `keep_min_p` leaves. Never a token of weight 0, as long as the
    row has one that is not.
    """
    if min_p_S1 is not None:
        weights_SV = keep_min_p(weights_SV, min_p_S1)
    sums_SV = weights_SV.cumsum(-1)
    total_S1 = sums_SV[:, -1:]
    target_S1 = (uniform_S1 * total_S1.double()).to(torch.int64)
    # The product may round up to the total, beyond the last token.
    target_S1 = torch.minimum(target_S1, total_S1 - 1)
    ids_S1 = torch.searchsorted(sums_SV, target_S1, right=True)
    return ids_S1.squeeze(-1).clamp(max=weights_SV.shape[-1] - 1)


def log_normalizer_torch(logits_SV: torch.Tensor, max_S1: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of the sum of exponentials, less the row maximum: float64 [S, 1]."""
    total_S1 = fixed_point_weights_torch(logits_SV, max_S1).sum(-1, keepdim=True)
    return (total_S1.double() / 2.0 ** weight_bits(logits_SV.shape[-1])).log()


def fixed_point_weights_triton(
    logits_SV: torch.Tensor, max_S1: torch.Tensor, temperature_S1: torch.Tensor | None = None
) -> torch.Tensor:
    num_rows, vocab_size = logits_SV.shape
    _check(logits_SV, max_S1, torch.float32)
    weights_SV = torch.empty(num_rows, vocab_size, dtype=torch.int64, device=logits_SV.device)
    tiles = elementwise_tiles(vocab_size)
    launch(
        _weights_kernel,
        (num_rows, triton.cdiv(vocab_size, tiles.columns)),
        logits_SV,
        max_S1.contiguous(),
        None if temperature_S1 is None else temperature_S1.contiguous(),
        weights_SV,
        logits_SV.stride(0),
        vocab_size,
        ONE=2.0 ** weight_bits(vocab_size),
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
    return weights_SV


def pick_triton(
    weights_SV: torch.Tensor, uniform_S1: torch.Tensor, min_p_S1: torch.Tensor | None = None
) -> torch.Tensor:
    num_rows, vocab_size = weights_SV.shape
    _check(weights_SV, uniform_S1, torch.float64)
    assert weights_SV.dtype == torch.int64
    ids_S = torch.empty(num_rows, dtype=torch.int64, device=weights_SV.device)
    tiles = scan_tiles(vocab_size)
    launch(
        _pick_kernel,
        (num_rows,),
        weights_SV,
        uniform_S1.contiguous(),
        None if min_p_S1 is None else min_p_S1.contiguous(),
        ids_S,
        weights_SV.stride(0),
        vocab_size,
        ONE=2.0 ** weight_bits(vocab_size),
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
    return ids_S


def log_normalizer_triton(logits_SV: torch.Tensor, max_S1: torch.Tensor) -> torch.Tensor:
    num_rows, vocab_size = logits_SV.shape
    _check(logits_SV, max_S1, torch.float32)
    total_S1 = torch.empty(num_rows, 1, dtype=torch.int64, device=logits_SV.device)
    one = 2.0 ** weight_bits(vocab_size)
    tiles = scan_tiles(vocab_size)
    launch(
        _total_kernel,
        (num_rows,),
        logits_SV,
        max_S1.contiguous(),
        total_S1,
        logits_SV.stride(0),
        vocab_size,
        ONE=one,
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
    return (total_S1.double() / one).log()


fixed_point_weights = by_device(fixed_point_weights_triton, fixed_point_weights_torch)
pick = by_device(pick_triton, pick_torch)
log_normalizer = by_device(log_normalizer_triton, log_normalizer_torch)


def _check(values_SV: torch.Tensor, column_S1: torch.Tensor, dtype: torch.dtype) -> None:
    assert values_SV.stride(1) == 1
    assert column_S1.shape == (values_SV.shape[0], 1) and column_S1.dtype == dtype


@triton.jit
def _weights_kernel(
    logits_ptr,
    max_ptr,
    temperature_ptr,
    weights_ptr,
    logits_stride,
    vocab_size,
    ONE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=mask, other=0.0)
    scaled = logits.to(tl.float32) - tl.load(max_ptr + row)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row) + tl.zeros((COLUMNS,), tl.float32)
        scaled = tl.div_rn(scaled, temperature)
    weights = (tl.exp(scaled) * ONE).to(tl.int64)
    tl.store(weights_ptr + row * vocab_size + columns, weights, mask=mask)


@triton.jit
def _total_kernel(
    logits_ptr,
    max_ptr,
    total_ptr,
    logits_stride,
    vocab_size,
    ONE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    greatest = tl.load(max_ptr + row)
    totals = tl.zeros((COLUMNS,), tl.int64)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        mask = columns < vocab_size
        at = logits_ptr + row * logits_stride + columns
        logits = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
        totals += (tl.exp(logits - greatest) * ONE).to(tl.int64)
    tl.store(total_ptr + row, tl.sum(totals, axis=0))


@triton.jit
def _load_weights(weights_ptr, columns, vocab_size, least):
    weights = tl.load(weights_ptr + columns, mask=columns < vocab_size, other=0)
    return tl.where(weights >= least, weights, 0)


@triton.jit
def _pick_kernel(
    weights_ptr,
    uniform_ptr,
    min_p_ptr,
    ids_ptr,
    weights_stride,
    vocab_size,
    ONE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * weights_stride
    offsets = tl.arange(0, COLUMNS)
    least = tl.zeros((), tl.int64)
    if min_p_ptr is not None:
        least = (tl.load(min_p_ptr + row) * ONE).to(tl.int64)
    totals = tl.zeros((COLUMNS,), tl.int64)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        totals += _load_weights(weights_ptr, start + offsets, vocab_size, least)
    total = tl.sum(totals, axis=0)
    target = (tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64)
    # The product may round up to the total, beyond the last token.
    target = tl.minimum(target, total - 1)

    # Pass over the blocks that end before the token; then count what stands before it in its own.
    first = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int64)
    weights = _load_weights(weights_ptr, offsets, vocab_size, least)
    in_block = tl.sum(weights, axis=0)
    while (first + COLUMNS < vocab_size) & (before + in_block <= target):
        before += in_block
        first += COLUMNS
        weights = _load_weights(weights_ptr, first + offsets, vocab_size, least)
        in_block = tl.sum(weights, axis=0)
    is_before = (before + tl.cumsum(weights, axis=0) <= target) & (first + offsets < vocab_size)
    token_id = first + tl.sum(is_before.to(tl.int32), axis=0)
    tl.store(ids_ptr + row, tl.minimum(token_id, vocab_size - 1).to(tl.int64))
