"""Weighted sum of what a token's experts gave it."""

from __future__ import annotations

from torch import Tensor

# Shapes: T tokens, K top-k, D model, R rows.


def weigh_slots(slots_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum over each token's slots -> [T, D] in fp32.

    Slots are added one after the other, by (token, slot): the result cannot depend on which
    expert, rank or replica a row came from.
    """
    out_TD: Tensor = slots_TKD[:, 0].float() * weights_TK[:, :1]
    for slot in range(1, weights_TK.shape[1]):
        out_TD = out_TD + slots_TKD[:, slot].float() * weights_TK[:, slot : slot + 1]
    return out_TD


def weigh_rows(rows_RD: Tensor, inverse_R: Tensor, weights_TK: Tensor) -> Tensor:
    """The same, where slot k of token t is row `inverse_R[t * K + k]` -> [T, D], rows' dtype."""
    num_tokens, top_k = weights_TK.shape
    slots_TKD = rows_RD.index_select(0, inverse_R).view(num_tokens, top_k, rows_RD.shape[1])
    return weigh_slots(slots_TKD, weights_TK).to(rows_RD.dtype)
