"""Choosing tokens from logits, so that a row never depends on the rows beside it.

Floating-point sums depend on the order of their terms, and that order on the batch. So
likelihoods become integers first, whose sums are exact in any order:

    logits   3.0   1.0   3.0   -inf
    weights  2^60  0.135 * 2^60  2^60  0      exp((logit - max) / temperature), V = 4
    sums     2^60  1.135 * 2^60  2.135 * 2^60  2.135 * 2^60
    u = 0.5 -> target 1.068 * 2^60 -> token 1, the first whose sum exceeds the target

Everything else is elementwise, a maximum, or a sort without ties: equal on every row position.

S rows, V vocabulary, C candidates in order of rank, 1 one value per row.
"""

from __future__ import annotations

import torch

# Wide enough for nearly every top-p set of a trained model; a row that needs more is sorted whole.
NUM_CANDIDATES = 1024


def weight_bits(vocab_size: int) -> int:
    """Binary logarithm of the likeliest token's weight: V such weights still fit in 62 bits."""
    return 62 - (vocab_size - 1).bit_length()


def fixed_point_weights(
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


def keep_top(
    weights_SV: torch.Tensor,
    logits_SV: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
) -> torch.Tensor:
    """Weights with all but the best tokens of each row set to zero: top-k, then top-p of the rest.

    `top_k_S` int64 in [1, V], V = off. `top_p_S` float64 in [0, 1], 1 = off: the shortest run of
    best tokens whose share reaches it, at least one. Equal logits rank by token id.
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


def keep_min_p(weights_SV: torch.Tensor, min_p_S1: torch.Tensor) -> torch.Tensor:
    """Weights with those below `min_p` times the likeliest token's set to zero. float64 [S, 1]."""
    least_S1 = (min_p_S1 * 2.0 ** weight_bits(weights_SV.shape[-1])).to(torch.int64)
    return torch.where(weights_SV >= least_S1, weights_SV, 0)


def pick(weights_SV: torch.Tensor, uniform_S1: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [S]: inverse CDF in order of token id at `uniform_S1`, float64 in [0, 1).

    Never a token of weight 0, as long as the row has one that is not.
    """
    sums_SV = weights_SV.cumsum(-1)
    total_S1 = sums_SV[:, -1:]
    target_S1 = (uniform_S1 * total_S1.double()).to(torch.int64)
    # The product may round up to the total, beyond the last token.
    target_S1 = torch.minimum(target_S1, total_S1 - 1)
    ids_S1 = torch.searchsorted(sums_SV, target_S1, right=True)
    return ids_S1.squeeze(-1).clamp(max=weights_SV.shape[-1] - 1)


def log_normalizer(logits_SV: torch.Tensor, max_S1: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of the sum of exponentials, less the row maximum: float64 [S, 1]."""
    total_S1 = fixed_point_weights(logits_SV, max_S1).sum(-1, keepdim=True)
    return (total_S1.double() / 2.0 ** weight_bits(logits_SV.shape[-1])).log()
