"""Small changes that make the fullest rank of a layer lighter. Pure.

All layers take a step at once. Loads are whole numbers, so that every machine finds the same best
change; of equal ones the first counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.experts.layer_loads import LayerLoads

# Shapes: A layers that take a step, E logical experts, R ranks, P slots rank by rank, S slots of
# the rank that has most, Q slots of the ranks to swap with, M slots whose expert has replicas to
# spare, N experts that could come instead.

Ints = npt.NDArray[np.int64]

NEVER = np.int64(1 << 62)
PAIR_ROUNDS = 8
NEAR_RANKS = 4
MOST_STEPS = 400
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


def improve(state: LayerLoads, least: int) -> None:
    """Until no step helps. `least`: replicas that each expert keeps."""
    if state.loads_LR.shape[1] == 1:
        return
    swap_pairs(state)
    enough_L = -(-state.load_LE.sum(axis=1) // state.loads_LR.shape[1])
    close_L = enough_L + enough_L // CLOSE
    layers = np.arange(len(enough_L))
    for _ in range(MOST_STEPS):
        layers = layers[state.most_L[layers] > enough_L[layers]]
        if not len(layers):
            break
        is_better_A = swap_near(state, layers)
        stuck = layers[~is_better_A]
        stuck = stuck[state.most_L[stuck] > close_L[stuck]]
        moved = stuck[change_any(state, stuck, least)] if len(stuck) else stuck
        layers = np.sort(np.concatenate((layers[is_better_A], moved)))


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
    """The best of all swaps and replacements of the fullest rank; says where that helped [A]."""
    most_A = state.most_L[layers]
    top_A = state.loads_LR[layers].argmax(axis=1)
    ranks_AR = np.broadcast_to(np.arange(state.loads_LR.shape[1]), state.loads_LR[layers].shape)
    swap = best_swap(state, layers, top_A, ranks_AR)
    replacement = best_replacement(state, layers, top_A, least)
    is_swap_A = (swap.after_A < most_A) & (swap.after_A <= replacement.after_A)
    is_replacement_A = (replacement.after_A < most_A) & ~is_swap_A
    state.swap(layers[is_swap_A], *swap.rows(is_swap_A))
    state.replace(layers[is_replacement_A], *replacement.rows(is_replacement_A))
    return is_swap_A | is_replacement_A


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

    Either a slot of the top rank, to any other expert; or one elsewhere, to an expert of the top
    rank, which then carries less of it.
    """
    expert_AP = state.slots_LP[layers]
    row_M, slot_M = np.nonzero(state.counts_LE[layers[:, None], expert_AP] > least)
    is_on_top_M = state.rank_P[slot_M] == top_A[row_M]
    best = Change(np.full(len(layers), NEVER), np.zeros_like(layers), np.zeros_like(layers))
    for is_wanted_M in (is_on_top_M, ~is_on_top_M):
        row, slot = row_M[is_wanted_M], slot_M[is_wanted_M]
        if not len(row):
            continue
        if is_wanted_M is is_on_top_M:
            expert_MN = np.arange(state.load_LE.shape[1])[None].repeat(len(row), axis=0)
        else:
            expert_MN = expert_AP[row[:, None], state.slots_RS[top_A[row]]]
        after_M, expert_M = _best_expert(state, layers[row], top_A[row], slot, expert_MN)
        best = _first_best(best, row, after_M, slot, expert_M)
    return best


def _best_expert(
    state: LayerLoads, layer_M: Ints, top_M: Ints, slot_M: Ints, expert_MN: Ints
) -> tuple[Ints, Ints]:
    """Of experts [M, any number], which one to put in each slot: (load after, expert), [M]."""
    rows, every = layer_M[:, None], np.arange(len(layer_M))
    old_M, rank_M = state.slots_LP[layer_M, slot_M], state.rank_P[slot_M]
    share_M = state.share_LE[layer_M, old_M]
    fewer_M = state.counts_LE[layer_M, old_M] - 1
    # The other replicas of the old expert carry more.
    risen_MR = state.loads_LR[layer_M] + np.where(
        state.held_LER[layer_M, old_M],
        (state.load_LE[layer_M, old_M] // fewer_M - share_M)[:, None],
        0,
    )
    top_risen_M = risen_MR[every, top_M]
    risen_MR[~state.held_LER[layer_M, old_M]] = 0
    risen_MR[every, top_M] = risen_MR[every, rank_M] = 0
    more_MN = state.load_LE[rows, expert_MN] // (state.counts_LE[rows, expert_MN] + 1)
    after_MN = (state.loads_LR[layer_M, rank_M] - share_M)[:, None] + more_MN
    is_elsewhere_M = rank_M != top_M
    relief_MN = state.share_LE[rows, expert_MN] - more_MN
    top_after_MN = np.where(is_elsewhere_M, top_risen_M, 0)[:, None] - relief_MN
    after_MN = np.maximum(np.maximum(after_MN, top_after_MN), risen_MR.max(axis=1)[:, None])
    after_MN[state.barred_LER[rows, expert_MN, rank_M[:, None]]] = NEVER
    best_M = after_MN.argmin(axis=1)
    return after_MN[every, best_M], expert_MN[every, best_M]


def _first_best(best: Change, row_M: Ints, after_M: Ints, slot_M: Ints, expert_M: Ints) -> Change:
    """`best`, or the first of the M candidates with the least load after, where that is less."""
    order_M = np.lexsort((np.arange(len(row_M)), after_M, row_M))
    row_A, first_A = np.unique(row_M[order_M], return_index=True)
    chosen = order_M[first_A]
    is_better = after_M[chosen] < best.after_A[row_A]
    row_A, chosen = row_A[is_better], chosen[is_better]
    for table_A, value_M in zip(best, (after_M, slot_M, expert_M), strict=True):
        table_A[row_A] = value_M[chosen]
    return best
