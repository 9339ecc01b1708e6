"""Top-k and top-p: zero the weights of all but a row's best tokens.

The kernel sorts nothing. Keys of tokens are distinct integers, so there is a threshold for every
number of tokens kept, and a search between integers finds it: each pass over the row counts, and
sums as integers, what lies above some thresholds, and goes on between two of them.

S rows, V vocabulary, C candidates in order of rank, 1 one value per row.
"""

from __future__ import annotations

import torch

from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.ordered_bits import ordered_bits
from moe_serve.kernels.row_tiles import scan_tiles

# Wide enough for nearly every top-p set of a trained model; a row that needs more is sorted whole.
NUM_CANDIDATES = 1024
# Blocks of a row on their way at a time: one program alone reads it, so nothing else hides that.
STAGES = tl.constexpr(4)


def rank_keys(logits_SV: torch.Tensor) -> torch.Tensor:
    """int64 [S, V], all distinct in a row: greater logit first, then lower token id.

    `logits_SV` fp32 without NaN. The upper 32 bits order as the floats do, the lower count down.
    """
    # Adding zero turns -0.0 into 0.0, which is equal to it but has other bits.
    bits_SV = (logits_SV + 0.0).view(torch.int32)
    # Negative floats grow in magnitude with their bits: turn those around.
    bits_SV ^= (bits_SV >> 31) & 0x7FFFFFFF
    vocab_size = logits_SV.shape[-1]
    countdown_V = torch.arange(vocab_size - 1, -1, -1, device=logits_SV.device)
    return bits_SV.to(torch.int64).mul_(2**32).add_(countdown_V)


def keep_top_torch(
    weights_SV: torch.Tensor,
    logits_SV: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
) -> torch.Tensor:
    """Weights with all but the best tokens of each row set to zero: top-k, then top-p of the rest.

    `weights_SV` int64, never greater for a smaller logit. `top_k_S` int64 in [1, V], V = off.
    `top_p_S` float64 in [0, 1], 1 = off: the shortest run of best tokens whose share reaches it,
    at least one. Equal logits rank by token id.
    """
    vocab_size = logits_SV.shape[-1]
    keys_SV = rank_keys(logits_SV)
    width = min(vocab_size, NUM_CANDIDATES, int(top_k_S.max()))
    kept_SV, is_settled_S = _keep_among(width, keys_SV, weights_SV, top_k_S, top_p_S)
    if width < vocab_size and not bool(is_settled_S.all()):
        rest = (~is_settled_S).nonzero().squeeze(-1)
        kept_SV[rest], _ = _keep_among(
            vocab_size, keys_SV[rest], weights_SV[rest], top_k_S[rest], top_p_S[rest]
        )
    return kept_SV


def _keep_among(
    width: int,
    keys_SV: torch.Tensor,
    weights_SV: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`keep_top` looking at the best `width` tokens; also which rows needed no more than those."""
    vocab_size = keys_SV.shape[-1]
    ids_SC = keys_SV.topk(width, dim=-1).indices
    weights_SC = weights_SV.gather(-1, ids_SC)
    sums_SC = weights_SC.cumsum(-1)
    top_k_S1 = top_k_S.unsqueeze(-1)
    total_S1 = torch.where(
        top_k_S1 < vocab_size,
        sums_SC.gather(-1, top_k_S1.clamp(max=width) - 1),
        weights_SV.sum(-1, keepdim=True),
    )
    wanted_S1 = (total_S1.double() * top_p_S.unsqueeze(-1)).ceil().to(torch.int64)
    wanted_S1 = torch.minimum(wanted_S1, total_S1)
    num_kept_S1 = torch.searchsorted(sums_SC, wanted_S1) + 1
    num_kept_S1 = torch.minimum(num_kept_S1, top_k_S1)
    is_kept_SC = torch.arange(width, device=ids_SC.device) < num_kept_S1
    kept_SV = torch.zeros_like(weights_SV).scatter_(-1, ids_SC, weights_SC * is_kept_SC)
    is_k_inside_S = (top_k_S <= width) & (top_k_S < vocab_size)
    is_p_inside_S = (top_k_S == vocab_size) & (num_kept_S1 <= width).squeeze(-1)
    return kept_SV, is_k_inside_S | is_p_inside_S


def keep_top_triton(
    weights_SV: torch.Tensor,
    logits_SV: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
) -> torch.Tensor:
    num_rows, vocab_size = logits_SV.shape
    assert weights_SV.shape == logits_SV.shape and vocab_size <= 1 << 30
    assert weights_SV.dtype == torch.int64 and logits_SV.dtype == torch.float32
    assert top_k_S.dtype == torch.int64 and top_p_S.dtype == torch.float64
    assert weights_SV.stride(1) == logits_SV.stride(1) == 1
    kept_SV = torch.empty(weights_SV.shape, dtype=torch.int64, device=weights_SV.device)
    tiles = scan_tiles(vocab_size)
    launch(
        _keep_top_kernel,
        (num_rows,),
        weights_SV,
        logits_SV,
        top_k_S.contiguous(),
        top_p_S.contiguous(),
        kept_SV,
        weights_SV.stride(0),
        logits_SV.stride(0),
        vocab_size,
        ID_BITS=(vocab_size - 1).bit_length(),
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
    return kept_SV


keep_top = by_device(keep_top_triton, keep_top_torch)


@triton.jit
def _load_keys(logits_ptr, columns, vocab_size, ID_BITS: tl.constexpr):
    """Distinct integers from -LIMIT up to LIMIT = 2 ** (31 + ID_BITS); smaller beyond the row."""
    logits = tl.load(logits_ptr + columns, mask=columns < vocab_size, other=0.0)
    keys = (ordered_bits(logits).to(tl.int64) << ID_BITS) + (vocab_size - 1 - columns)
    return tl.where(columns < vocab_size, keys, -(2**62))


@triton.jit
def _above(
    weights_ptr,
    logits_ptr,
    vocab_size,
    low,
    high,
    WITH_SUMS: tl.constexpr,
    ID_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """For three thresholds that quarter [low, high): how many tokens have keys from there on, and
    the sum of their weights.
    """
    at_1, at_2, at_3 = _quarters(low, high)
    counts_1 = tl.zeros((COLUMNS,), tl.int32)
    counts_2 = tl.zeros((COLUMNS,), tl.int32)
    counts_3 = tl.zeros((COLUMNS,), tl.int32)
    sums_1 = tl.zeros((COLUMNS,), tl.int64)
    sums_2 = tl.zeros((COLUMNS,), tl.int64)
    sums_3 = tl.zeros((COLUMNS,), tl.int64)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        keys = _load_keys(logits_ptr, columns, vocab_size, ID_BITS)
        counts_1 += (keys >= at_1).to(tl.int32)
        counts_2 += (keys >= at_2).to(tl.int32)
        counts_3 += (keys >= at_3).to(tl.int32)
        if WITH_SUMS:
            weights = tl.load(weights_ptr + columns, mask=columns < vocab_size, other=0)
            sums_1 += tl.where(keys >= at_1, weights, 0)
            sums_2 += tl.where(keys >= at_2, weights, 0)
            sums_3 += tl.where(keys >= at_3, weights, 0)
    counts = tl.sum(counts_1), tl.sum(counts_2), tl.sum(counts_3)
    return counts, (tl.sum(sums_1), tl.sum(sums_2), tl.sum(sums_3))


@triton.jit
def _quarters(low, high):
    width = high - low
    return low + width // 4, low + width // 2, low + width * 3 // 4


@triton.jit
def _narrow(threshold, count, is_enough, low, high, num_kept, num_above):
    """The closer bounds, and how many tokens lie from each on."""
    low = tl.where(is_enough, tl.maximum(low, threshold), low)
    num_kept = tl.where(is_enough, tl.minimum(num_kept, count), num_kept)
    high = tl.where(is_enough, high, tl.minimum(high, threshold))
    num_above = tl.where(is_enough, num_above, tl.maximum(num_above, count))
    return low, high, num_kept, num_above


@triton.jit
def _best_k(logits_ptr, vocab_size, top_k, ID_BITS: tl.constexpr, COLUMNS: tl.constexpr):
    """The key from which on there are `top_k` tokens."""
    high = tl.full((), 1, tl.int64) << (31 + ID_BITS)
    low = -high
    num_kept = tl.zeros((), tl.int32) + vocab_size
    num_above = tl.zeros((), tl.int32)
    while num_kept > top_k:
        at = _quarters(low, high)
        counts, _ = _above(logits_ptr, logits_ptr, vocab_size, low, high, False, ID_BITS, COLUMNS)
        for probe in tl.static_range(3):
            low, high, num_kept, num_above = _narrow(
                at[probe], counts[probe], counts[probe] >= top_k, low, high, num_kept, num_above
            )
    return low


@triton.jit
def _best_share(
    weights_ptr,
    logits_ptr,
    vocab_size,
    low,
    top_k,
    top_p,
    ID_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The same for the fewest tokens with `top_p` of the weight of the `top_k` from `low` on."""
    high = tl.full((), 1, tl.int64) << (31 + ID_BITS)
    totals = tl.zeros((COLUMNS,), tl.int64)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        weights = tl.load(weights_ptr + columns, mask=columns < vocab_size, other=0)
        totals += tl.where(_load_keys(logits_ptr, columns, vocab_size, ID_BITS) >= low, weights, 0)
    total = tl.sum(totals)
    wanted = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    wanted = tl.maximum(tl.minimum(wanted, total), 1)
    num_kept = top_k.to(tl.int32)
    num_above = tl.zeros((), tl.int32)
    while num_kept - num_above > 1:
        at = _quarters(low, high)
        counts, sums = _above(
            weights_ptr, logits_ptr, vocab_size, low, high, True, ID_BITS, COLUMNS
        )
        for probe in tl.static_range(3):
            low, high, num_kept, num_above = _narrow(
                at[probe], counts[probe], sums[probe] >= wanted, low, high, num_kept, num_above
            )
    return low


@triton.jit
def _keep_top_kernel(
    weights_ptr,
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    kept_ptr,
    weights_stride,
    logits_stride,
    vocab_size,
    ID_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * weights_stride
    logits_ptr += row * logits_stride
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    low = _best_k(logits_ptr, vocab_size, top_k, ID_BITS, COLUMNS)
    if top_p < 1.0:
        low = _best_share(weights_ptr, logits_ptr, vocab_size, low, top_k, top_p, ID_BITS, COLUMNS)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        keys = _load_keys(logits_ptr, columns, vocab_size, ID_BITS)
        weights = tl.load(weights_ptr + columns, mask=columns < vocab_size, other=0)
        kept = tl.where(keys >= low, weights, 0)
        tl.store(kept_ptr + row * vocab_size + columns, kept, mask=columns < vocab_size)
