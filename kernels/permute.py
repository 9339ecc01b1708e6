"""Sort (token, slot) pairs by expert, so that each expert's rows stand together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Shapes: T tokens, K top-k, E experts, R rows: the pairs that have an expert here.


class Permutation(NamedTuple):
    """`order_R[r]` is the flat (token * K + slot) index that row r came from; `counts_E` sums to R.

    `inverse_R` is its inverse: flat index -> row. Pairs without an expert stand behind the R rows
    in both, which are then T * K long.
    """

    order_R: Tensor
    inverse_R: Tensor
    counts_E: Tensor


def permute(ids_TK: Tensor, num_experts: int) -> Permutation:
    """Stable: rows of one expert keep the order of their tokens. An id of -1 is no expert.

    Example, K = 2, three experts, ids [[2, 0], [0, 1]]: flat experts are 2 0 0 1, so
    order is 1 2 3 0, inverse 3 0 1 2, counts 2 1 1.
    """
    flat_R = ids_TK.flatten().long()
    flat_R = flat_R.where(flat_R >= 0, num_experts)
    order_R = flat_R.argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return Permutation(order_R, inverse_R, count_ids(flat_R, num_experts + 1)[:num_experts])


def count_ids(ids_R: Tensor, num_ids: int) -> Tensor:
    """How often each of 0 .. num_ids - 1 occurs, int64. Unlike `bincount`, no sync on a GPU."""
    ids_R = ids_R.long()
    return ids_R.new_zeros(num_ids).scatter_add_(0, ids_R, torch.ones_like(ids_R))
