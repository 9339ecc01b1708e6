from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.experts.moving.migration import (
    Copies,
    ExpertCopy,
    layers_of,
    plan_copies,
    replaced,
    split_copies,
)
from moe_serve.experts.placement import LayerPlacement, Placement
from tests.experts.moves import moves

Move = tuple[Placement, Placement]


def place(*layers: tuple[tuple[int, ...], ...]) -> Placement:
    return Placement(tuple(LayerPlacement(layer) for layer in layers))


def applied(old: Placement, copies: Copies) -> Placement:
    """What lies where after all copies were made at once, from the slots as they were."""
    slots = [[list(own) for own in layer.experts] for layer in old.layers]
    for rank, own in enumerate(copies):
        for copy in own:
            source = old.layers[copy.layer].experts[copy.source_rank][copy.source_slot]
            slots[copy.layer][rank][copy.slot] = source
    return place(*(tuple(map(tuple, layer)) for layer in slots))


@settings(max_examples=50)
@given(moves())
def test_copies_from_the_old_slots_give_the_new_placement(move: Move) -> None:
    old, new = move
    copies = plan_copies(old, new)
    assert len(copies) == old.num_ranks
    assert applied(old, copies) == new


@settings(max_examples=50)
@given(moves())
def test_no_slot_is_filled_twice_or_without_need_and_none_from_afar_without_need(
    move: Move,
) -> None:
    old, new = move
    for rank, own in enumerate(plan_copies(old, new)):
        assert len({(copy.layer, copy.slot) for copy in own}) == len(own)
        for copy in own:
            before = old.layers[copy.layer].experts[rank]
            expert = new.layers[copy.layer].experts[rank][copy.slot]
            assert before[copy.slot] != expert
            assert (copy.source_rank == rank) == (expert in before)


def test_replicas_share_the_giving() -> None:
    old = place(((0, 1), (0, 2), (3, 1), (2, 3)))
    new = place(((0, 1), (2, 0), (3, 0), (0, 3)))
    # Rank 1 only swaps its own; of expert 0, ranks 0 and 1 give one each.
    assert plan_copies(old, new) == (
        (),
        (ExpertCopy(0, 0, 1, 1), ExpertCopy(0, 1, 1, 0)),
        (ExpertCopy(0, 1, 0, 0),),
        (ExpertCopy(0, 0, 1, 0),),
    )


@settings(max_examples=50)
@given(moves())
def test_nothing_is_copied_where_nothing_changes(move: Move) -> None:
    old, _ = move
    assert all(own == () for own in plan_copies(old, old))
    assert split_copies(plan_copies(old, old), 1) == []


@settings(max_examples=50)
@given(moves(), st.integers(0, 9))
def test_parts_hold_whole_layers_and_as_many_copies_as_allowed(move: Move, limit: int) -> None:
    copies = plan_copies(*move)
    parts = split_copies(copies, limit)
    layers = [layers_of(part) for part in parts]
    # In order, each layer in one part, all ranks in each part.
    assert [layer for part in layers for layer in part] == layers_of(copies)
    assert all(part for part in layers)
    rejoined = tuple(
        tuple(copy for part in parts for copy in part[rank]) for rank in range(len(copies))
    )
    assert rejoined == copies
    for part, own_layers in zip(parts, layers, strict=True):
        assert max(map(len, part)) <= limit or len(own_layers) == 1


@settings(max_examples=50)
@given(moves(), st.integers(0, 9))
def test_no_part_could_have_taken_the_next_layer_too(move: Move, limit: int) -> None:
    parts = split_copies(plan_copies(*move), limit)
    for part, following in zip(parts, parts[1:], strict=False):
        first = min(layers_of(following))
        sizes = [
            len(own) + sum(copy.layer == first for copy in after)
            for own, after in zip(part, following, strict=True)
        ]
        assert max(sizes) > limit


@settings(max_examples=50)
@given(moves(), st.integers(1, 9))
def test_parts_one_after_another_give_the_new_placement(move: Move, limit: int) -> None:
    placement, new = move
    for part in split_copies(plan_copies(placement, new), limit):
        after = replaced(placement, new, layers_of(part))
        assert applied(placement, part) == after
        placement = after
    assert placement == new


def test_only_the_named_layers_are_replaced() -> None:
    old = place(((0,), (1,)), ((0,), (1,)), ((0,), (1,)))
    new = place(((1,), (0,)), ((1,), (0,)), ((1,), (0,)))
    mixed = replaced(old, new, [0, 2])
    assert mixed.layers == (new.layers[0], old.layers[1], new.layers[2])
    assert replaced(old, new, []) == old


def test_placements_of_other_sizes_are_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        plan_copies(place(((0,), (1,))), place(((0, 1), (1,))))
