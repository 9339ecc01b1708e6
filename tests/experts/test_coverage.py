"""What is lost with a rank, and what it costs to lose nothing."""

from __future__ import annotations

import numpy as np
import pytest

from moe_serve.errors import PlacementError
from moe_serve.experts.balance import BalanceGoal, balance
from moe_serve.experts.coverage import Loss, coverage_price, lost_with
from moe_serve.experts.placement import LayerPlacement, Placement


def test_an_expert_on_one_rank_only_is_lost_with_it() -> None:
    placement = Placement(
        (
            LayerPlacement(((0, 1), (1, 2), (2, 0))),
            LayerPlacement(((1, 0), (2, 1), (1, 0))),
            LayerPlacement(((2, 1), (0, 1), (1, 0))),
        )
    )
    assert lost_with(placement) == [Loss(1, 1, (2,)), Loss(2, 0, (2,))]


def test_without_replicas_every_expert_is_lost_with_its_rank() -> None:
    losses = lost_with(Placement.make(2, 7, 3))
    assert losses[:3] == [Loss(0, 0, (0, 1, 2)), Loss(0, 1, (3, 4)), Loss(0, 2, (5, 6))]
    assert len(losses) == 6


def test_two_replicas_of_each_expert_lose_nothing() -> None:
    load_LE = np.arange(34).reshape(2, 17) ** 3
    placement = balance(load_LE, (12, 12, 12), goal=BalanceGoal(min_replicas=2))
    assert lost_with(placement) == []


def test_the_price_is_a_second_slot_for_each_expert_that_has_none() -> None:
    load_LE = np.array([[90, 5, 3, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    price = coverage_price(load_LE, num_ranks=4, num_redundant=4, expert_bytes=1000)
    assert (price.num_slots, price.num_covered_slots, price.num_extra_slots) == (12, 16, 4)
    assert price.extra_bytes == 4 * 2 * 1000
    assert price.extra_bytes_of_rank == 1 * 2 * 1000
    assert price.extra_gb == pytest.approx(8e-6)
    assert 0 < price.balancedness_min <= price.balancedness_mean <= 1
    assert 0 < price.covered_balancedness_min <= price.covered_balancedness_mean <= 1
    # Four slots to spare go to the expert that carries 90 %; a second one for each of the others
    # leaves it with as many ranks only if slots are added.
    assert price.balancedness_min > 0.95


def test_slots_that_are_there_anyway_are_free() -> None:
    price = coverage_price(np.ones((1, 8)), num_ranks=4, num_redundant=12, expert_bytes=1000)
    assert (price.num_extra_slots, price.extra_bytes, price.extra_gb_of_rank) == (0, 0, 0.0)
    assert price.balancedness_mean == price.covered_balancedness_mean == 1.0


def test_uneven_ranks_pay_for_the_one_that_gets_most() -> None:
    price = coverage_price(np.ones((1, 7)), num_ranks=3, num_redundant=0, expert_bytes=10)
    assert (price.num_extra_slots, price.extra_bytes, price.extra_bytes_of_rank) == (7, 70, 30)


def test_one_rank_cannot_be_covered() -> None:
    with pytest.raises(PlacementError, match="would hold one of 4 experts twice"):
        coverage_price(np.ones((1, 4)), num_ranks=1, num_redundant=0, expert_bytes=1)
