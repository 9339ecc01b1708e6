"""An even placement of each layer, without regard to where experts are now. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.experts.layer_loads import LayerLoads
from moe_serve.experts.local_search import improve
from moe_serve.experts.packing import pack
from moe_serve.experts.replication import replicate

# Shapes: L MoE layers, A some of them, V tries, E logical experts, P slots rank by rank.

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TRIES = 16
MOST_TURNS = 128
# A layer whose fullest rank exceeds what is possible by more than this part of it is tried again,
# a few times, where all layers' tries take no more slots than CHEAP.
EVEN = 1000
EVEN_TURNS = 4
CHEAP = 1 << 15


class Solved(NamedTuple):
    """Expert by slot [L, P]; load of the fullest rank [L] and the least it could be: the mean over
    ranks, or the heaviest replica; and whether experts were kept off ranks that had them, or have
    as many replicas as there are ranks [L].
    """

    slots_LP: Ints
    most_L: Ints
    least_L: Ints
    is_bent_L: Bools


def solve(load_LE: Ints, num_slots: tuple[int, ...], least: int) -> Ints:
    """[L, P]: every expert `least` times or more, on no rank twice. Each rank has a slot or more.

    Where that a rank takes an expert once made a difference, the published algorithm, which does
    not mind, sets a bar. Layers above it, and other uneven ones as far as that is cheap, are tried
    again with other replicas.
    """
    slots_LP, most_L, least_L, is_bent_L = _solve_once(load_LE, load_LE, num_slots, least)
    bar_L = most_L.copy()
    if least == 1 and is_bent_L.any():
        bar_L[is_bent_L] = published_most(load_LE[is_bent_L], num_slots)
    even_L = least_L + least_L // EVEN
    for turn in range(MOST_TURNS):
        if turn == EVEN_TURNS or (turn + 1) * TRIES * slots_LP.size > CHEAP:
            even_L = bar_L
        layers = np.flatnonzero(most_L > np.minimum(bar_L, even_L))
        if not len(layers):
            break
        again_LP, again_L = _try_others(load_LE[layers], num_slots, least, turn)
        is_better_A = again_L < most_L[layers]
        slots_LP[layers[is_better_A]] = again_LP[is_better_A]
        most_L[layers[is_better_A]] = again_L[is_better_A]
    return slots_LP


def published_most(load_LE: Ints, num_slots: tuple[int, ...]) -> Ints:
    """[L]: the fullest rank's load by DeepSeek's published algorithm, repeats and all."""
    counts_LE = replicate(load_LE, sum(num_slots), most=sum(num_slots))
    packed = pack(load_LE, counts_LE, num_slots, may_repeat=True)
    share_LP = np.take_along_axis(load_LE // counts_LE, packed.slots_LP, axis=1)
    starts = np.cumsum((0, *num_slots[:-1]))
    most_L: Ints = np.add.reduceat(share_LP, starts, axis=1).max(axis=1)
    return most_L


def _solve_once(load_LE: Ints, guide_LE: Ints, num_slots: tuple[int, ...], least: int) -> Solved:
    """Replicas and first places by the loads `guide_LE`, the rest by `load_LE`."""
    num_ranks = len(num_slots)
    counts_LE = replicate(guide_LE, sum(num_slots), most=num_ranks, least=least)
    packed = pack(guide_LE, counts_LE, num_slots)
    state = LayerLoads(load_LE=load_LE, slots_LP=packed.slots_LP, num_slots=num_slots)
    improve(state, least)
    least_L = np.maximum((load_LE // counts_LE).max(axis=1), load_LE.sum(axis=1) // num_ranks)
    is_bent_L = packed.is_bent_L | (counts_LE == num_ranks).any(axis=1)
    return Solved(state.slots_LP, state.most_L, least_L, is_bent_L)


def _try_others(
    load_LE: Ints, num_slots: tuple[int, ...], least: int, turn: int
) -> tuple[Ints, Ints]:
    """The best of some tries with loads distorted: (expert by slot [A, P], fullest rank [A])."""
    num_layers, num_experts = load_LE.shape
    factor_VE = _distortions(num_experts, turn)
    guide_AVE = (load_LE >> 10)[:, None] * factor_VE
    solved = _solve_once(
        load_LE.repeat(TRIES, axis=0), guide_AVE.reshape(-1, num_experts), num_slots, least
    )
    most_AV = solved.most_L.reshape(num_layers, TRIES)
    best_A = most_AV.argmin(axis=1)
    every = np.arange(num_layers)
    slots_AVP = solved.slots_LP.reshape(num_layers, TRIES, -1)
    return slots_AVP[every, best_A], most_AV[every, best_A]


def _distortions(num_experts: int, turn: int) -> Ints:
    """[V, E]: factors in parts of 1024, from about 1 +- 1/64 to between 0 and 5.

    Hashed rather than drawn, so that they are the same on every machine and with every numpy: the
    finalizer of SplitMix64 (Steele, Lea and Flood 2014).
    """
    first = turn * TRIES * num_experts + 1
    hash_N = np.arange(first, first + TRIES * num_experts, dtype=np.uint64)
    hash_N *= np.uint64(0x9E3779B97F4A7C15)
    hash_N = (hash_N ^ (hash_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hash_N = (hash_N ^ (hash_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    signed_VE = (hash_N >> np.uint64(48)).astype(np.int64).reshape(TRIES, -1) - (1 << 15)
    width_V = 16 * np.arange(1, TRIES + 1) ** 2
    factor_VE: Ints = np.maximum(1024 + ((signed_VE * width_V[:, None]) >> 15), 0)
    return factor_VE
