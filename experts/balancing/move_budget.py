"""Where a limited number of moves gains most. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.errors import PlacementError
from moe_serve.experts.balancing.layer_loads import LayerLoads
from moe_serve.experts.balancing.local_search import best_replacement, best_swap

# Shapes: L MoE layers, A layers that take a step, E logical experts, R ranks, P slots rank by rank.

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# A layer takes this many times its even part of the budget, or SMALL moves, and not more.
TIMES_EVEN = 4
SMALL = 16


class Option(NamedTuple):
    """What a layer may become: moves it takes, load of its fullest rank then, expert by slot."""

    moves: int
    most: float
    slots_P: Ints


def steps_from(
    state: LayerLoads, now_LP: Ints, shift_L: Ints, least: int, max_moves: int
) -> list[list[Option]]:
    """By layer: the state it is in, and after each step that makes its fullest rank lighter.

    A step is the swap or the replacement that gains most for each slot it changes. Moves count from
    `now_LP`; `shift_L` makes loads of the state's.
    """
    num_layers = len(now_LP)
    limit = min(max_moves, max(SMALL, TIMES_EVEN * max_moves // max(num_layers, 1)))
    options: list[list[Option]] = [[] for _ in range(num_layers)]
    layers = np.arange(num_layers)
    now = LayerLoads(load_LE=state.load_LE, slots_LP=now_LP, num_slots=state.num_slots)
    while len(layers):
        moves_A = np.count_nonzero(state.held_LER[layers] & ~now.held_LER[layers], axis=(1, 2))
        most_A = np.ldexp(state.most_L[layers].astype(np.float64), -shift_L[layers])
        for layer, moves, most in zip(
            layers.tolist(), moves_A.tolist(), most_A.tolist(), strict=True
        ):
            options[layer].append(Option(moves, most, state.slots_LP[layer].copy()))
        layers = layers[moves_A < limit]
        if len(layers):
            layers = layers[_step(state, layers, least)]
    return options


def _step(state: LayerLoads, layers: Ints, least: int) -> Bools:
    most_A = state.most_L[layers]
    top_A = state.loads_LR[layers].argmax(axis=1)
    swap = best_swap(state, layers, top_A, state.every_rank(len(layers)))
    replacement = best_replacement(state, layers, top_A, least)
    # A swap changes two slots, so a replacement counts twice.
    gain_A = np.maximum(most_A - swap.after_A, 0)
    replacement_gain_A = np.maximum(most_A - replacement.after_A, 0)
    is_swap_A: Bools = gain_A > 2 * replacement_gain_A
    is_replacement_A: Bools = (replacement_gain_A > 0) & ~is_swap_A
    state.swap(layers[is_swap_A], *swap.rows(is_swap_A))
    state.replace(layers[is_replacement_A], *replacement.rows(is_replacement_A))
    return is_swap_A | is_replacement_A


def choose(options: Sequence[Sequence[Option]], max_moves: int) -> list[Option]:
    """One option of each layer, `max_moves` in all at most, the sum of fullest ranks small.

    First the cheapest of each layer, then along the lower hull of its options wherever a move gains
    most, then whatever still fits. Raises `PlacementError` where the cheapest take too many.
    """
    chosen = [min(of_layer, key=lambda option: option[:2]) for of_layer in options]
    left = max_moves - sum(option.moves for option in chosen)
    if left < 0:
        raise PlacementError(
            f"{max_moves} moves at most: {max_moves - left} are needed to meet the goal"
        )
    segments = [
        (-(a.most - b.most) / (b.moves - a.moves), layer, index, b)
        for layer, of_layer in enumerate(options)
        for index, (a, b) in enumerate(_hull(chosen[layer], of_layer))
    ]
    closed: set[int] = set()
    for _, layer, _, option in sorted(segments, key=lambda segment: segment[:3]):
        more = option.moves - chosen[layer].moves
        if more > left:
            closed.add(layer)
        if layer not in closed:
            chosen[layer] = option
            left -= more
    return _fill(options, chosen, left)


def _hull(first: Option, options: Sequence[Option]) -> list[tuple[Option, Option]]:
    """Segments from `first` on, each the steepest from where the last one ends."""
    segments: list[tuple[Option, Option]] = []
    at = first
    while True:
        better = [o for o in options if o.moves > at.moves and o.most < at.most]
        if not better:
            return segments
        start = at
        at = min(better, key=lambda o: ((o.most - start.most) / (o.moves - start.moves), o.moves))
        segments.append((start, at))


def _fill(options: Sequence[Sequence[Option]], chosen: list[Option], left: int) -> list[Option]:
    while True:
        gains = [
            (option.most - chosen[layer].most, layer, index)
            for layer, of_layer in enumerate(options)
            for index, option in enumerate(of_layer)
            if option.moves - chosen[layer].moves <= left and option.most < chosen[layer].most
        ]
        if not gains:
            return chosen
        _, layer, index = min(gains)
        left -= options[layer][index].moves - chosen[layer].moves
        chosen[layer] = options[layer][index]
