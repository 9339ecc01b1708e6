"""Loads to balance: recorded ones from files, and Zipf ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Shapes: L MoE layers, E logical experts.

Loads = npt.NDArray[Any]

TOKENS_AN_EXPERT = 400


class LoadSet(NamedTuple):
    """Loads of one shape that share a row of the table, [L, E] each."""

    name: str
    loads: tuple[Loads, ...]


def zipf_set(skew: float, num_layers: int, num_experts: int, seeds: Sequence[int]) -> LoadSet:
    """The n-th most wanted of a layer in proportion to n ** -skew, with Poisson noise, shuffled."""
    share_E = np.arange(1, num_experts + 1) ** -skew
    mean_E = share_E / share_E.sum() * num_experts * TOKENS_AN_EXPERT
    loads = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        loads.append(np.stack([rng.permutation(rng.poisson(mean_E)) for _ in range(num_layers)]))
    return LoadSet(f"zipf {skew:g}, {num_layers} x {num_experts}", tuple(loads))


def recorded_sets(folder: Path) -> Iterator[LoadSet]:
    """Of each `*_counts.json`: {"counts": {name: [layers][experts]}}; its tasks are one set."""
    for file in sorted(folder.glob("*_counts.json")):
        counts = json.loads(file.read_text())["counts"]
        loads = tuple(np.array(of_task) for of_task in counts.values())
        shape = " x ".join(map(str, loads[0].shape))
        yield LoadSet(f"{file.stem.removesuffix('_counts')}, {len(loads)} tasks, {shape}", loads)
