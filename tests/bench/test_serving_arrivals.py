from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.bench.serving.arrivals import arrivals


@given(
    num=st.integers(1, 300),
    rate=st.floats(0.01, 1000),
    burstiness=st.floats(0.001, 100),
    seed=st.integers(0, 2**40),
)
def test_times_rise_to_the_length_that_the_rate_gives(
    num: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrivals(num, rate, burstiness, seed)
    assert len(times) == num and times[0] >= 0
    assert all(after >= before for before, after in zip(times, times[1:], strict=False))
    assert math.isclose(times[-1], num / rate)
    assert times == arrivals(num, rate, burstiness, seed)


def test_all_at_once_and_nothing() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrivals(0, 2.0, 1.0, 0) == []


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_spread_as_burstiness_says(burstiness: float) -> None:
    """The standard deviation of a gamma over its mean is 1 / sqrt(shape); exponential: 1."""
    gaps = np.diff(arrivals(20000, 10.0, burstiness, 3))
    assert gaps.mean() == pytest.approx(0.1, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_another_seed_is_another_order_of_gaps() -> None:
    assert arrivals(7, 1.0, 1.0, 0) != arrivals(7, 1.0, 1.0, 1)
