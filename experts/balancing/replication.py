"""How many replicas each expert gets. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Shapes: L MoE layers, E logical experts.

Ints = npt.NDArray[np.int64]


def replicate(load_LE: Ints, num_slots: int, most: int, least: int = 1) -> Ints:
    """[L, E]: replicas that sum to `num_slots`, each from `least` to `most`.

    One more at a time for the expert whose replicas carry most (as published with DeepSeek's EPLB),
    which makes the heaviest replica as light as it can be; `most` is what the ranks can hold, for a
    rank holds an expert once. Loads that are equal go to the lowest expert.
    Example, load 9 4 3, 5 slots: counts 3 1 1.
    """
    num_layers, num_experts = load_LE.shape
    counts_LE = np.full(load_LE.shape, least, dtype=np.int64)
    # Never 0, so that experts without load share the slots that nobody needs.
    load_LE = load_LE + num_slots
    share_LE = load_LE // least if least < most else np.full_like(load_LE, -1)
    every = np.arange(num_layers)
    for _ in range(num_slots - num_experts * least):
        hottest_L = share_LE.argmax(axis=1)
        count_L = counts_LE[every, hottest_L] + 1
        counts_LE[every, hottest_L] = count_L
        share_L = load_LE[every, hottest_L] // count_L
        share_LE[every, hottest_L] = np.where(count_L < most, share_L, -1)
    return counts_LE
