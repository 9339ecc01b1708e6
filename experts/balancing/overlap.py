"""A new placement laid over the present one, so that few experts move. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.experts.balancing.layer_loads import held_by

# Shapes: L MoE layers, E logical experts, R ranks, N nodes, P slots rank by rank, B bins (ranks or
# nodes).

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def num_moves(held_LER: Bools, current_LER: Bools) -> Ints:
    """[L]: slots whose rank did not hold their expert before."""
    moves_L: Ints = np.count_nonzero(held_LER & ~current_LER, axis=(1, 2))
    return moves_L


def relabel(
    held_LER: Bools, current_LER: Bools, num_slots: Sequence[int], num_nodes: int = 1
) -> Bools:
    """`held_LER` with ranks renamed, so that they keep much of what they hold now.

    A rank takes the name of one with as many slots. With nodes, whole nodes are renamed first, then
    ranks in each. Greatest overlap first: not always the least number of moves.
    Example, now 0 1 | 2 3, wanted 2 3 | 0 1: becomes 0 1 | 2 3.
    """
    sizes = np.array(num_slots)
    if num_nodes > 1:
        nodes = sizes.reshape(num_nodes, -1)
        shared_LNN = _overlap(_by_node(held_LER, num_nodes), _by_node(current_LER, num_nodes))
        taken_LN = _match(shared_LNN, (nodes[:, None] == nodes).all(axis=2))
        ranks_NR = np.arange(len(sizes)).reshape(num_nodes, -1)
        held_LER = _take(held_LER, ranks_NR[taken_LN].reshape(len(held_LER), -1))
    node_R = np.arange(len(sizes)) // (len(sizes) // num_nodes)
    is_like_RR = (sizes[:, None] == sizes) & (node_R[:, None] == node_R)
    return _take(held_LER, _match(_overlap(held_LER, current_LER), is_like_RR))


def slots_like(held_LER: Bools, current_LP: npt.NDArray[Any], num_slots: Sequence[int]) -> Ints:
    """[L, P]: what stays on a rank stays in its slot; what comes fills the others in order.

    Example, a rank with 4 1 7 that is to hold 1 2 4: 4 1 2.
    """
    rank_P = np.repeat(np.arange(len(num_slots)), num_slots)
    rows = np.arange(len(current_LP))[:, None]
    current_LER = held_by(current_LP, num_slots, held_LER.shape[1])
    slots_LP = current_LP.astype(np.int64)
    come_LRE = (held_LER & ~current_LER).transpose(0, 2, 1)
    # Both run through layers, and in each through ranks: the n-th free slot is for the n-th comer.
    slots_LP[~held_LER[rows, current_LP, rank_P]] = np.nonzero(come_LRE)[2]
    return slots_LP


def slots_in_order(held_LER: Bools) -> Ints:
    """[L, P]: the experts of each rank, lowest first."""
    return np.nonzero(held_LER.transpose(0, 2, 1))[2].reshape(len(held_LER), -1)


def _overlap(held_LEB: Bools, current_LEB: Bools) -> Ints:
    """[L, B, B]: experts that a bin as it is to be shares with each as it is now."""
    shared = held_LEB.transpose(0, 2, 1).astype(np.float32) @ current_LEB.astype(np.float32)
    return shared.astype(np.int64)


def _by_node(held_LER: Bools, num_nodes: int) -> Bools:
    held_LEN: Bools = held_LER.reshape(*held_LER.shape[:2], num_nodes, -1).max(axis=3)
    return held_LEN


def _match(overlap_LBB: Ints, is_like_BB: Bools) -> Ints:
    """[L, B]: for each bin as it is now, which of the new ones it becomes."""
    num_layers, num_bins, _ = overlap_LBB.shape
    score_LBB = np.where(is_like_BB, overlap_LBB, -1)
    taken_LB = np.zeros((num_layers, num_bins), dtype=np.int64)
    every = np.arange(num_layers)
    for _ in range(num_bins):
        best_L = score_LBB.reshape(num_layers, -1).argmax(axis=1)
        new_L, now_L = np.divmod(best_L, num_bins)
        taken_LB[every, now_L] = new_L
        score_LBB[every, new_L] = score_LBB[every, :, now_L] = -2
    return taken_LB


def _take(held_LER: Bools, rank_LR: Ints) -> Bools:
    return np.take_along_axis(held_LER, rank_LR[:, None], axis=2)
