"""Which weights must be copied where, so that experts lie anew. Pure."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

from moe_serve.experts.placement import LayerPlacement, Placement


class ExpertCopy(NamedTuple):
    """Fill a slot of this rank from one of another rank, or of its own. Slots count per rank."""

    layer: int
    slot: int
    source_rank: int
    source_slot: int


Copies = tuple[tuple[ExpertCopy, ...], ...]


def plan_copies(old: Placement, new: Placement) -> Copies:
    """By rank: what it must copy, layer by layer, all from where experts lay before.

    From its own slots where it can; else from the replica that has the fewest copies to give so
    far in the layer, the first among equals.
    """
    assert old.slots_of_ranks == new.slots_of_ranks and old.num_layers == new.num_layers
    copies: list[list[ExpertCopy]] = [[] for _ in range(old.num_ranks)]
    for layer, (before, after) in enumerate(zip(old.layers, new.layers, strict=True)):
        for rank, copy in _plan_layer(layer, before, after):
            copies[rank].append(copy)
    return tuple(map(tuple, copies))


def _plan_layer(
    layer: int, before: LayerPlacement, after: LayerPlacement
) -> list[tuple[int, ExpertCopy]]:
    holders: dict[int, dict[int, int]] = collections.defaultdict(dict)
    for rank, own in enumerate(before.experts):
        for slot, expert in enumerate(own):
            holders[expert][rank] = slot
    given = collections.Counter[int]()
    planned = []
    for rank, own in enumerate(after.experts):
        for slot, expert in enumerate(own):
            if before.experts[rank][slot] == expert:
                continue
            slots = holders[expert]
            source = rank if rank in slots else min(slots, key=lambda other: (given[other], other))
            given[source] += source != rank
            planned.append((rank, ExpertCopy(layer, slot, source, slots[source])))
    return planned


def split_copies(copies: Copies, max_experts: int) -> list[Copies]:
    """In parts of whole layers, in order, of which no rank copies more than `max_experts` at once.

    A layer that exceeds that alone is a part of its own.
    """
    layers = layers_of(copies)
    counts = [collections.Counter(copy.layer for copy in own) for own in copies]
    sizes = [[count[layer] for count in counts] for layer in layers]
    parts: list[set[int]] = []
    filled: list[int] = []
    for layer, size in zip(layers, sizes, strict=True):
        together = [a + b for a, b in zip(filled, size, strict=True)] if parts else size
        if not parts or max(together) > max_experts:
            parts.append({layer})
            filled = size
        else:
            parts[-1].add(layer)
            filled = together
    return [_of_layers(copies, part) for part in parts]


def _of_layers(copies: Copies, layers: set[int]) -> Copies:
    return tuple(tuple(copy for copy in own if copy.layer in layers) for own in copies)


def layers_of(copies: Copies) -> list[int]:
    return sorted({copy.layer for own in copies for copy in own})


def replaced(old: Placement, new: Placement, layers: Sequence[int]) -> Placement:
    """`old` with those layers of `new`."""
    chosen = set(layers)
    return Placement(
        tuple(
            after if index in chosen else before
            for index, (before, after) in enumerate(zip(old.layers, new.layers, strict=True))
        )
    )
