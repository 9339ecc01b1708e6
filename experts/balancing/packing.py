"""Replicas into the slots of ranks, heaviest first. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Shapes: L MoE layers, A some of them, E logical experts, R ranks, P slots = replicas to place.

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FULL = np.int64(1 << 62)


def pack(
    load_LE: Ints,
    counts_LE: Ints,
    num_slots: tuple[int, ...],
    may_repeat_L: Bools | None = None,
) -> Ints:
    """The logical expert of each slot, rank by rank, [L, P].

    Longest processing time first: each replica, heaviest first, to the lightest rank with room.
    That rank must not hold its expert, unless the layer `may_repeat_L` [L]. Equal ones: lower
    expert, lower rank first. `counts_LE` sum to P in each layer; without repeats none exceeds the
    ranks. Each rank has a slot at least.
    Example, loads 5 4 3 2 on two ranks of two slots: 0 3 | 1 2.
    """
    share_LE = load_LE // counts_LE
    expert_LP = _heaviest_first(share_LE, counts_LE, sum(num_slots))
    share_LP = np.take_along_axis(share_LE, expert_LP, axis=1)
    most_P: Ints = np.take_along_axis(counts_LE, expert_LP, axis=1).max(axis=0, initial=0)
    if may_repeat_L is None:
        may_repeat_L = np.zeros(len(load_LE), dtype=np.bool_)
    ranks = _Ranks(load_LE.shape, num_slots, ~may_repeat_L)
    rank_LP = np.empty_like(expert_LP)
    for item, most in enumerate(most_P.tolist()):
        rank_LP[:, item] = ranks.take(expert_LP[:, item], share_LP[:, item], most > 1)
    for layer, item in np.argwhere(rank_LP < 0).tolist():
        _make_room(expert_LP[layer], share_LP[layer], rank_LP[layer], item, num_slots)
    order_LP = rank_LP.argsort(axis=1, kind="stable")
    return np.take_along_axis(expert_LP, order_LP, axis=1)


class _Ranks:
    """Load, room and experts of the ranks of all layers while they fill."""

    def __init__(
        self, shape_LE: tuple[int, ...], num_slots: tuple[int, ...], is_once_L: Bools
    ) -> None:
        self.is_once_L = is_once_L
        self.every = np.arange(shape_LE[0])
        self.room_LR = np.tile(np.array(num_slots), (shape_LE[0], 1))
        self.load_LR = np.zeros_like(self.room_LR)  # FULL where there is no room
        self.held_LER = np.zeros((*shape_LE, len(num_slots)), dtype=np.bool_)

    def take(self, expert_L: Ints, share_L: Ints, may_clash: bool) -> Ints:
        """Place one replica in each layer; its rank, or -1 where no rank can take it."""
        rank_L: Ints = self.load_LR.argmin(axis=1)
        layers = self.every
        if may_clash:
            key_LR = np.where(self.held_LER[layers, expert_L], FULL, self.load_LR)
            free_L = key_LR.argmin(axis=1)
            rank_L = np.where(key_LR[layers, free_L] < FULL, free_L, -1)
            if rank_L.min() < 0:
                layers = np.flatnonzero(rank_L >= 0)
        own_A = rank_L[layers]
        if may_clash:
            self.held_LER[layers, expert_L[layers], own_A] = self.is_once_L[layers]
        room_A = self.room_LR[layers, own_A] - 1
        self.room_LR[layers, own_A] = room_A
        load_A = self.load_LR[layers, own_A] + share_L[layers]
        self.load_LR[layers, own_A] = np.where(room_A > 0, load_A, FULL)
        return rank_L


def _heaviest_first(share_LE: Ints, counts_LE: Ints, num_slots: int) -> Ints:
    order_LE = (-share_LE).argsort(axis=1, kind="stable")
    counts = np.take_along_axis(counts_LE, order_LE, axis=1).ravel()
    return np.repeat(order_LE.ravel(), counts).reshape(len(share_LE), num_slots)


def _make_room(
    expert_P: Ints, share_P: Ints, rank_P: Ints, stuck: int, num_slots: tuple[int, ...]
) -> None:
    """Place an item whose expert lies on every rank with room, by moving another there.

    Some rank lacks the expert, as it has fewer replicas than ranks; that rank is full, and since
    slots differ by one at most it holds an expert that the rank with room lacks.
    """
    num_ranks = len(num_slots)
    is_placed_P = rank_P >= 0
    filled_R = np.bincount(rank_P[is_placed_P], minlength=num_ranks)
    load_R = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(load_R, rank_P[is_placed_P], share_P[is_placed_P])
    holders = set(rank_P[is_placed_P & (expert_P == expert_P[stuck])].tolist())
    options = []
    for rank in np.flatnonzero(filled_R < num_slots).tolist():
        if rank not in holders:  # what was moved for an earlier one opened it
            rank_P[stuck] = rank
            return
        own = set(expert_P[rank_P == rank].tolist())
        for item in np.flatnonzero(is_placed_P).tolist():
            other = int(rank_P[item])
            if other not in holders and int(expert_P[item]) not in own:
                there = load_R[other] - share_P[item] + share_P[stuck]
                here = load_R[rank] + share_P[item]
                options.append((max(int(there), int(here)), rank, item))
    _, rank, item = min(options)
    rank_P[stuck] = rank_P[item]
    rank_P[item] = rank
