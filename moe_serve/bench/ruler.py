"""One ruler on the CPU: what a call takes, how two calls compare, how far results are apart.

`gpu_ruler` is its counterpart for a GPU, which runs behind the host.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Call = Callable[[], Any]
# Nanoseconds from some moment on.
Clock = Callable[[], int]

# Between two looks at the clock, in microseconds: next to it, looking takes nothing.
SPAN_US = 200.0
MOST_SAMPLES, FEWEST_SAMPLES = 60, 5


class Spread(NamedTuple):
    """Median and quartiles: of one call's microseconds, or of a ratio."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """At least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.1f} [{self.low:.1f}, {self.high:.1f}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`ratio`: theirs / ours, pair by pair: above 1, ours is faster. Its median is not the ratio of
    the medians: what slows the machine down for a while slows both of a pair.
    """

    ours: Spread
    theirs: Spread
    ratio: Spread


def time_calls(
    calls: Sequence[Call],
    *,
    budget_us: float = 300_000.0,
    clock: Clock = time.perf_counter_ns,
) -> Spread:
    """What one call takes, in turns over `calls`: the same work on inputs of its own each.

    With enough of them none finds its inputs, or its weights, in a cache. Each is called once
    before, unmeasured. `budget_us` bounds the rest where fewest samples do not take longer.
    """
    turns = _Turns(calls, clock)
    span = turns.span_us
    num_samples = int(max(FEWEST_SAMPLES, min(MOST_SAMPLES, budget_us / max(span, 1e-3))))
    return Spread.of([turns.sample() for _ in range(num_samples)])


def compare(
    ours: Sequence[Call],
    theirs: Sequence[Call],
    pairs: int,
    *,
    clock: Clock = time.perf_counter_ns,
) -> Comparison:
    """Two contestants side by side; who begins alternates, so that drift favours neither."""
    contestants = _Turns(ours, clock), _Turns(theirs, clock)
    samples: list[tuple[float, float]] = []
    for number in range(pairs):
        first, second = contestants if number % 2 == 0 else contestants[::-1]
        pair = first.sample(), second.sample()
        samples.append(pair if number % 2 == 0 else pair[::-1])
    return Comparison(
        ours=Spread.of([pair[0] for pair in samples]),
        theirs=Spread.of([pair[1] for pair in samples]),
        ratio=Spread.of([pair[1] / pair[0] for pair in samples]),
    )


class _Turns:
    """Warmed-up calls that take turns; a sample is so many of them that they fill a span."""

    def __init__(self, calls: Sequence[Call], clock: Clock) -> None:
        self._clock = clock
        for call in calls:
            call()
        self._turns: Iterator[Call] = itertools.cycle(calls)
        self._num_calls = 1
        once = self.sample()
        self._num_calls = max(1, round(SPAN_US / max(once, SPAN_US / 10_000)))
        self.span_us = once * self._num_calls

    def sample(self) -> float:
        """Microseconds of one call, on average over a span."""
        calls = list(itertools.islice(self._turns, self._num_calls))
        clock = self._clock
        began = clock()
        for call in calls:
            call()
        return (clock() - began) / 1e3 / len(calls)


def difference(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, both as vectors; infinite where `found` has a NaN."""
    found, expected = found.double(), expected.double()
    if not bool(found.isfinite().all()):
        return float("inf")
    norm = float(expected.norm())
    distance = float((found - expected).norm())
    return distance if norm == 0 else distance / norm
