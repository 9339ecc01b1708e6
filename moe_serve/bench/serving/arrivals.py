"""When requests arrive: seconds from the start of a run."""

from __future__ import annotations

import math

import numpy as np


def arrivals(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Times of an open loop, not falling; all 0 at an infinite rate.

    Gaps are gamma-distributed with mean 1 / rate and shape `burstiness`: 1 is a Poisson process,
    less comes in bursts, more is even (as `vllm bench serve --burstiness`). As there, times are
    stretched until the last one is num_requests / rate, so that short runs have the rate too.
    """
    assert rate > 0 and burstiness > 0
    if math.isinf(rate) or not num_requests:
        return [0.0] * num_requests
    random = np.random.default_rng([seed, 0xA5])
    times = np.cumsum(random.gamma(burstiness, 1 / (rate * burstiness), num_requests))
    if times[-1] == 0:  # gaps below the least float: one burst
        return [num_requests / rate] * num_requests
    return [float(time) for time in times / times[-1] * (num_requests / rate)]
