"""The ruler reads what a clock says, which is not a real one here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from moe_serve.bench.ruler import (
    FEWEST_SAMPLES,
    MOST_SAMPLES,
    Spread,
    compare,
    difference,
    time_calls,
)


class Hands:
    """A clock that calls move forward; `made` lists them in order."""

    def __init__(self) -> None:
        self.now = 0
        self.made: list[str] = []

    def __call__(self) -> int:
        return self.now

    def call(self, name: str, us: float) -> Callable[[], None]:
        def run() -> None:
            self.now += round(us * 1e3)
            self.made.append(name)

        return run


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_long_calls_are_timed_one_by_one_in_turns() -> None:
    hands = Hands()
    calls = [hands.call("a", 1000), hands.call("b", 3000)]
    spread = time_calls(calls, budget_us=8_000, clock=hands)
    # a 1, b 3, a 1, b 3, ...: one that was timed to find out how long they take comes first.
    assert spread == Spread(2000.0, 1000.0, 3000.0)
    assert hands.made[:5] == ["a", "b", "a", "b", "a"]
    assert len(hands.made) == 2 + 1 + 8


def test_short_calls_are_timed_many_at_once() -> None:
    hands = Hands()
    assert time_calls([hands.call("a", 2), hands.call("b", 4)], budget_us=1e9, clock=hands) == (
        3.0, 3.0, 3.0,
    )  # fmt: skip
    # The first takes 2 us, so 100 of them fill a span.
    assert len(hands.made) == 2 + 1 + 100 * MOST_SAMPLES


def test_a_small_budget_still_gives_a_median() -> None:
    hands = Hands()
    assert time_calls([hands.call("a", 5e6)], budget_us=1, clock=hands).median == 5e6
    assert len(hands.made) == 2 + FEWEST_SAMPLES


def test_calls_too_short_for_the_clock_are_not_called_forever() -> None:
    hands = Hands()
    assert time_calls([hands.call("a", 0)], clock=hands) == (0.0, 0.0, 0.0)
    assert len(hands.made) < 10**6


def test_pairs_alternate_who_begins_and_their_ratios_survive_drift() -> None:
    hands = Hands()
    factor = iter([*[1] * 4, *[number for number in (1, 5, 2, 9) for _ in range(2)]])

    def call(name: str, us: float) -> Callable[[], None]:
        return lambda: hands.call(name, us * next(factor))()

    found = compare([call("ours", 1000)], [call("theirs", 3000)], pairs=4, clock=hands)
    assert found.ratio == Spread(3.0, 3.0, 3.0)
    assert found.ours == Spread(3500.0, 1750.0, 6000.0)
    assert hands.made[4:] == ["ours", "theirs", "theirs", "ours"] * 2


@pytest.mark.parametrize(
    ("found", "expected", "distance"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([0.5, 0.0], [0.0, 0.0], 0.5),
        ([math.nan, 1.0], [0.0, 1.0], math.inf),
    ],
)
def test_a_difference_is_relative_and_a_nan_is_infinitely_far(
    found: list[float], expected: list[float], distance: float
) -> None:
    assert difference(torch.tensor(found), torch.tensor(expected)) == pytest.approx(distance)
