"""Small changes that make the fullest rank of a layer lighter. Pure.

All layers take a step at once. Loads are whole numbers, so that every machine finds the same best
change; of equal ones the first counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.experts.balancing.layer_loads import LayerLoads

# Shapes: A layers that take a step, E logical experts, R ranks, P slots rank by rank, S slots of
# the rank that has most, Q slots of the ranks to swap with, M slots whose expert has replicas to
# spare, N experts that could come instead.

Ints = npt.NDArray[np.int64]

NEVER = np.int64(1 << 62)
PAIR_ROUNDS = 4
NEAR_RANKS = 4
MOST_STEPS = 400
# Steps that weigh every change of a rank, times slots of all layers: large tasks take fewer.
MOST_WIDE = 140_000
# Where the fullest rank is this close to the mean, in parts of the mean, only cheap steps go on.
CLOSE = 2000


class Change(NamedTuple):
    """By layer [A]: the greatest load of the top rank and those that rise, once it is made.

    Swap: `slot` and `other` exchange their experts. Replacement: `slot` takes expert `other`.
    """

    after_A: Ints
    slot_A: Ints
    other_A: Ints

    def rows(self, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        return self.slot_A[chosen], self.other_A[chosen]


def improve(state: LayerLoads, least: int, bar_L: Ints | None = None) -> None:
    """Until no step helps, or only cheap ones are left and would help little.

    `least`: replicas that each expert keeps. Above `bar_L` a layer goes on with all steps.
    """
    if state.loads_LR.shape[1] == 1:
        return
    swap_pairs(state)
    enough_L = -(-state.load_LE.sum(axis=1) // state.loads_LR.shape[1])
    close_L = enough_L + enough_L // CLOSE
    if bar_L is not None:
        close_L = np.minimum(close_L, bar_L)
    layers = np.arange(len(enough_L))
    wide_steps = 1 + MOST_WIDE // state.slots_LP.size
    for _ in range(MOST_STEPS):
        layers = layers[state.most_L[layers] > enough_L[layers]]
        if not len(layers):
            break
        is_better_A = swap_near(state, layers)
        stuck = layers[~is_better_A]
        stuck = stuck[state.most_L[stuck] > close_L[stuck]] if wide_steps else stuck[:0]
        if len(stuck):
            stuck = stuck[change_any(state, stuck, least)]
            wide_steps -= 1
        layers = np.sort(np.concatenate((layers[is_better_A], stuck)))


def swap_pairs(state: LayerLoads) -> None:
    """The fullest rank with the emptiest, the next with the next ...: one swap in each pair.

    A round changes many ranks of a layer for the price of one; no pair's fuller rank gets fuller.
    """
    num_pairs = state.loads_LR.shape[1] // 2
    layers = np.arange(len(state.loads_LR))
    for _ in range(PAIR_ROUNDS):
        if not len(layers):
            break
        order_AR = state.loads_LR[layers].argsort(axis=1, kind="stable")
        low_A = order_AR[:, :num_pairs].ravel()
        high_A = order_AR[:, ::-1][:, :num_pairs].ravel()
        layer_A = layers.repeat(num_pairs)
        swap = best_swap(state, layer_A, high_A, low_A[:, None])
        is_better_A = swap.after_A < state.loads_LR[layer_A, high_A]
        state.swap(layer_A[is_better_A], *swap.rows(is_better_A))
        layers = np.unique(layer_A[is_better_A])


def swap_near(state: LayerLoads, layers: Ints) -> npt.NDArray[np.bool_]:
    """Swap between the fullest rank and the emptiest few; says where that helped [A]."""
    order_AR = state.loads_LR[layers].argsort(axis=1, kind="stable")
    top_A = order_AR[:, -1]
    swap = best_swap(state, layers, top_A, order_AR[:, : min(NEAR_RANKS, order_AR.shape[1] - 1)])
    is_better_A = swap.after_A < state.loads_LR[layers, top_A]
    state.swap(layers[is_better_A], *swap.rows(is_better_A))
    return is_better_A


def change_any(state: LayerLoads, layers: Ints, least: int) -> npt.NDArray[np.bool_]:
    """Replace a slot of the fullest rank, or else swap it with any; says where that helped [A]."""
    most_A = state.most_L[layers]
    top_A = state.loads_LR[layers].argmax(axis=1)
    replacement = best_replacement(state, layers, top_A, least)
    is_better_A = replacement.after_A < most_A
    state.replace(layers[is_better_A], *replacement.rows(is_better_A))
    rest_A = np.flatnonzero(~is_better_A)
    if len(rest_A):
        swap = best_swap(state, layers[rest_A], top_A[rest_A], state.every_rank(len(rest_A)))
        is_better = swap.after_A < most_A[rest_A]
        state.swap(layers[rest_A[is_better]], *swap.rows(is_better))
        is_better_A[rest_A[is_better]] = True
    return is_better_A


def best_swap(state: LayerLoads, layers: Ints, top_A: Ints, with_AR: Ints) -> Change:
    """The swap of a slot of rank `top_A` with one of the ranks `with_AR` [A, any number]."""
    rows, every = layers[:, None], np.arange(len(layers))
    slot_AS = state.slots_RS[top_A]
    other_AQ = state.slots_RS[with_AR].reshape(len(layers), -1)
    rank_AQ = state.rank_P[other_AQ]
    expert_AS, expert_AQ = state.slots_LP[rows, slot_AS], state.slots_LP[rows, other_AQ]
    share_AS, share_AQ = state.share_LE[rows, expert_AS], state.share_LE[rows, expert_AQ]
    rest_AS = state.loads_LR[layers, top_A][:, None] - share_AS
    rest_AQ = state.loads_LR[rows, rank_AQ] - share_AQ
    after_ASQ = np.maximum(
        rest_AS[..., None] + share_AQ[:, None], share_AS[..., None] + rest_AQ[:, None]
    )
    # A rank holds an expert once. This also rules out a swap of the top rank with itself.
    is_there = state.barred_LER[rows[..., None], expert_AS[..., None], rank_AQ[:, None]]
    is_here = state.barred_LER[rows, expert_AQ, top_A[:, None]]
    after_ASQ[is_there | is_here[:, None]] = NEVER
    flat = after_ASQ.reshape(len(layers), -1)
    best_A = flat.argmin(axis=1)
    slot_index_A, other_index_A = np.divmod(best_A, other_AQ.shape[1])
    return Change(flat[every, best_A], slot_AS[every, slot_index_A], other_AQ[every, other_index_A])


def best_replacement(state: LayerLoads, layers: Ints, top_A: Ints, least: int) -> Change:
    """A slot whose expert has replicas to spare goes to another expert.

    One elsewhere, to an expert of the top rank, which then carries less of it; or, where none helps
    so, one of the top rank, to any other expert.
    """
    best = Change(np.full(len(layers), NEVER), np.zeros_like(layers), np.zeros_like(layers))
    spare = _spare_slots(state, layers, top_A, least)
    is_on_top_M = state.rank_P[spare.slot_M] == top_A[spare.row_M]
    elsewhere = spare.where(~is_on_top_M)
    if len(elsewhere.row_M):
        layer_M, slot_MS = layers[elsewhere.row_M], state.slots_RS[top_A[elsewhere.row_M]]
        expert_MN = state.slots_LP[layer_M[:, None], slot_MS]
        _keep_better(best, elsewhere.row_M, _best_expert(state, layer_M, elsewhere, expert_MN))
    is_stuck_A = best.after_A >= state.loads_LR[layers, top_A]
    on_top = spare.where(is_on_top_M & is_stuck_A[spare.row_M])
    if len(on_top.row_M):
        layer_M = layers[on_top.row_M]
        expert_MN = np.arange(state.load_LE.shape[1])[None].repeat(len(layer_M), axis=0)
        on_top = on_top._replace(top_M=np.zeros_like(layer_M))  # that is the rank itself
        _keep_better(best, on_top.row_M, _best_expert(state, layer_M, on_top, expert_MN))
    return best


class _Spare(NamedTuple):
    """Slots whose expert has replicas to spare, and what follows if that one goes: loads of their
    rank, of the top rank, and of the fullest of the others that hold the expert.
    """

    row_M: Ints
    slot_M: Ints
    rest_M: Ints
    top_M: Ints
    others_M: Ints

    def where(self, is_wanted_M: npt.NDArray[np.bool_]) -> _Spare:
        return _Spare(*(table_M[is_wanted_M] for table_M in self))


def _spare_slots(state: LayerLoads, layers: Ints, top_A: Ints, least: int) -> _Spare:
    # By expert first, X of them: replicas of one expert have nearly all of this in common.
    is_spare_AE = state.counts_LE[layers] > least
    row_X, expert_X = np.nonzero(is_spare_AE)
    layer_X, every = layers[row_X], np.arange(len(row_X))
    share_X = state.share_LE[layer_X, expert_X]
    fewer_X = state.counts_LE[layer_X, expert_X] - 1
    rise_X = state.load_LE[layer_X, expert_X] // fewer_X - share_X
    held_XR = state.held_LER[layer_X, expert_X]
    risen_XR = np.where(held_XR, state.loads_LR[layer_X] + rise_X[:, None], 0)
    on_top_X = np.where(held_XR[every, top_A[row_X]], rise_X, 0)
    risen_XR[every, top_A[row_X]] = 0
    fullest_X = risen_XR.argmax(axis=1)
    first_X = risen_XR[every, fullest_X]
    risen_XR[every, fullest_X] = 0
    second_X = risen_XR.max(axis=1)

    expert_AP = state.slots_LP[layers]
    row_M, slot_M = np.nonzero(np.take_along_axis(is_spare_AE, expert_AP, axis=1))
    index_AE = np.cumsum(is_spare_AE).reshape(is_spare_AE.shape) - 1
    index_M = index_AE[row_M, expert_AP[row_M, slot_M]]
    rank_M = state.rank_P[slot_M]
    return _Spare(
        row_M,
        slot_M,
        state.loads_LR[layers[row_M], rank_M] - share_X[index_M],
        state.loads_LR[layers, top_A][row_M] + on_top_X[index_M],
        np.where(rank_M == fullest_X[index_M], second_X[index_M], first_X[index_M]),
    )


def _best_expert(state: LayerLoads, layer_M: Ints, spare: _Spare, expert_MN: Ints) -> Change:
    """Which of the experts [M, N] to put in each slot."""
    rows, every = layer_M[:, None], np.arange(len(layer_M))
    share_MN = state.load_LE[rows, expert_MN] // (state.counts_LE[rows, expert_MN] + 1)
    relief_MN = state.share_LE[rows, expert_MN] - share_MN
    after_MN = np.maximum(spare.rest_M[:, None] + share_MN, spare.others_M[:, None])
    after_MN = np.maximum(after_MN, spare.top_M[:, None] - relief_MN)
    after_MN[state.barred_LER[rows, expert_MN, state.rank_P[spare.slot_M][:, None]]] = NEVER
    best_M = after_MN.argmin(axis=1)
    return Change(after_MN[every, best_M], spare.slot_M, expert_MN[every, best_M])


def _keep_better(best: Change, row_M: Ints, change_M: Change) -> None:
    """Put into `best` the first of the least of each row, where it is less. Rows are in order."""
    row_A, start_A = np.unique(row_M, return_index=True)
    least_A = np.minimum.reduceat(change_M.after_A, start_A)
    hit = np.flatnonzero(change_M.after_A == least_A.repeat(np.diff(start_A, append=len(row_M))))
    chosen = hit[np.searchsorted(hit, start_A)]
    is_better = least_A < best.after_A[row_A]
    for table_A, value_M in zip(best, change_M, strict=True):
        table_A[row_A[is_better]] = value_M[chosen[is_better]]
