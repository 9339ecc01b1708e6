"""Router scores to the top-k experts of each token, in fp32 throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.elementwise import sigmoid

# Shapes: T tokens, E experts, K top-k, G groups.


def topk_router(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: str,
    renormalize: bool,
    scale: float = 1.0,
    correction_bias_E: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """-> ids [T, K] int64 (best first), weights [T, K] fp32. T = 0 is fine.

    `score` "softmax" or "sigmoid" over all experts. The correction bias selects and never weighs
    (DeepSeek-V3). With groups, only experts of the `top_groups` best groups may be chosen; a group
    is worth the sum of its two best biased scores (its best one, without a bias).
    `renormalize` divides the chosen weights by their sum; `scale` multiplies them at the end.
    """
    scores_TE = _scores(logits_TE.float(), score)
    choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E.float()
    if top_groups < num_groups:
        best = 1 if correction_bias_E is None else 2
        choice_TE = _mask_groups(choice_TE, num_groups, top_groups, best)
    ids_TK = _topk_lowest_id_first(choice_TE, top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return ids_TK, weights_TK * scale if scale != 1.0 else weights_TK


def _scores(logits_TE: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits_TE.softmax(-1)
    if score == "sigmoid":
        return sigmoid(logits_TE)
    raise ValueError(f"unknown router score {score!r}")


def _mask_groups(choice_TE: Tensor, num_groups: int, top_groups: int, best: int) -> Tensor:
    grouped_TGe = choice_TE.unflatten(-1, (num_groups, -1))
    # A group may hold a single expert in small models.
    best = min(best, grouped_TGe.shape[-1])
    worth_TG = grouped_TGe.topk(best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth_TG, dtype=torch.bool)
    kept.scatter_(1, worth_TG.topk(top_groups, dim=-1).indices, True)
    # -inf, not 0: biased scores may all be negative.
    masked_TE: Tensor = grouped_TGe.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    return masked_TE


def _topk_lowest_id_first(choice_TE: Tensor, top_k: int) -> Tensor:
    """Top-k with ties to the lowest id, so that the choice is the same on every device."""
    order_TE: Tensor = choice_TE.sort(dim=-1, descending=True, stable=True).indices
    return order_TE[:, :top_k].contiguous()
