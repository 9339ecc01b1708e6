"""An even placement of each layer, without regard to where experts are now. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.experts.balancing.layer_loads import LayerLoads
from moe_serve.experts.balancing.local_search import improve
from moe_serve.experts.balancing.packing import pack
from moe_serve.experts.balancing.replication import replicate

# Shapes: L MoE layers, A some of them, V tries, X tries of all of them, E logical experts, P slots
# rank by rank.

Ints = npt.NDArray[np.int64]

TRIES = 16
MOST_TURNS = 128
# A layer whose fullest rank exceeds what is possible by more than this part of it is tried again,
# a few times, where all layers' tries take no more slots than CHEAP.
EVEN = 1000
EVEN_TURNS = 4
CHEAP = 10_000


class Solved(NamedTuple):
    """Expert by slot [L, P]; load of the fullest rank [L]; a bound below it: the mean over ranks,
    or what the heaviest replica makes of its rank [L]; and what the published algorithm makes it.
    """

    slots_LP: Ints
    most_L: Ints
    least_L: Ints
    bar_L: Ints


def solve(load_LE: Ints, num_slots: tuple[int, ...], least: int) -> Ints:
    """[L, P]: every expert `least` times or more, on no rank twice. Each rank has a slot or more.

    The published algorithm, which may put an expert on a rank twice, sets a bar. Layers above it,
    and other uneven ones as far as that is cheap, are tried again with other replicas.
    """
    slots_LP, most_L, least_L, bar_L = _solve_first(load_LE, num_slots, least)
    _go_on(load_LE, num_slots, least, slots_LP, most_L, bar_L)
    even_L = least_L + least_L // EVEN
    for turn in range(MOST_TURNS):
        if turn == EVEN_TURNS or (turn + 1) * TRIES * slots_LP.size > CHEAP:
            even_L = bar_L
        layers = np.flatnonzero(most_L > np.minimum(bar_L, even_L))
        if not len(layers):
            break
        again_LP, again_L = _try_others(load_LE[layers], num_slots, least, turn, bar_L[layers])
        is_better_A = again_L < most_L[layers]
        slots_LP[layers[is_better_A]] = again_LP[is_better_A]
        most_L[layers[is_better_A]] = again_L[is_better_A]
    return slots_LP


def _solve_first(load_LE: Ints, num_slots: tuple[int, ...], least: int) -> Solved:
    """Packs by the published rules, which allow a rank the same expert again, at the same time."""
    num_layers, num_ranks, total = len(load_LE), len(num_slots), sum(num_slots)
    counts_LE = replicate(load_LE, total, most=num_ranks, least=least)
    free_LE = replicate(load_LE, total, most=total)
    packed_LP = pack(
        np.concatenate((load_LE, load_LE)),
        np.concatenate((counts_LE, free_LE)),
        num_slots,
        np.repeat((False, True), num_layers),
    )
    slots_LP, free_LP = packed_LP[:num_layers], packed_LP[num_layers:]
    state = LayerLoads(load_LE=load_LE, slots_LP=slots_LP, num_slots=num_slots)
    improve(state, least)
    share_LP = np.take_along_axis(load_LE // free_LE, free_LP, axis=1)
    # A share is rounded down by up to one, so rounding alone may make that much of a difference.
    bar_L = np.add.reduceat(share_LP, state.slots_RS[:, 0], axis=1).max(axis=1) + total
    least_L = np.maximum((load_LE // counts_LE).max(axis=1), load_LE.sum(axis=1) // num_ranks)
    if total == load_LE.shape[1]:  # then the heaviest has company that nothing makes lighter
        sorted_LE = np.sort(load_LE, axis=1)
        with_heaviest_L = sorted_LE[:, : min(num_slots) - 1].sum(axis=1) + sorted_LE[:, -1]
        least_L = np.maximum(least_L, with_heaviest_L)
    return Solved(state.slots_LP, state.most_L, least_L, bar_L if least == 1 else state.most_L)


def _go_on(
    load_LE: Ints,
    num_slots: tuple[int, ...],
    least: int,
    slots_LP: Ints,
    most_L: Ints,
    bar_L: Ints,
) -> None:
    """Layers above the bar take the steps that they were spared; `slots_LP`, `most_L` change."""
    layers = np.flatnonzero(most_L > bar_L)
    if len(layers):
        state = LayerLoads(load_LE=load_LE[layers], slots_LP=slots_LP[layers], num_slots=num_slots)
        improve(state, least, bar_L[layers])
        slots_LP[layers], most_L[layers] = state.slots_LP, state.most_L


def _try_others(
    load_LE: Ints, num_slots: tuple[int, ...], least: int, turn: int, bar_A: Ints
) -> tuple[Ints, Ints]:
    """The best of some tries: (expert by slot [A, P], load of the fullest rank [A]).

    Replicas and first places are by distorted loads, the rest by the true ones.
    """
    num_layers, num_experts = load_LE.shape
    guide_AVE = (load_LE >> 10)[:, None] * _distortions(num_experts, turn)
    guide_XE = guide_AVE.reshape(-1, num_experts)
    counts_XE = replicate(guide_XE, sum(num_slots), most=len(num_slots), least=least)
    state = LayerLoads(
        load_LE=load_LE.repeat(TRIES, axis=0),
        slots_LP=pack(guide_XE, counts_XE, num_slots),
        num_slots=num_slots,
    )
    improve(state, least, bar_A.repeat(TRIES))
    most_AV = state.most_L.reshape(num_layers, TRIES)
    best_A = most_AV.argmin(axis=1)
    every = np.arange(num_layers)
    slots_AVP = state.slots_LP.reshape(num_layers, TRIES, -1)
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
