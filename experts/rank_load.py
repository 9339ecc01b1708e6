"""What each rank carries under a placement, and how even that is. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import PlacementError
from moe_serve.experts.placement import Placement

# Shapes: L MoE layers, E logical experts, R ranks, P slots of all ranks, rank by rank.

Floats = npt.NDArray[np.float64]


def rank_loads(load_LE: npt.NDArray[Any], placement: Placement) -> Floats:
    """[L, R]: the sum over a rank's slots; each of c replicas of an expert carries 1 / c of it.

    Example, one layer, load 6 and 4, ranks (0), (0, 1): 3 and 7.
    """
    check_loads(load_LE)
    if load_LE.shape != (placement.num_layers, placement.num_experts):
        raise PlacementError(
            f"loads of {load_LE.shape[0]} layers x {load_LE.shape[1]} experts: the placement has "
            f"{placement.num_layers} x {placement.num_experts}"
        )
    slots_LP = placement.slots_LP
    counts_LE = replica_counts(slots_LP, load_LE.shape[1])
    share_LP = np.take_along_axis(load_LE / np.maximum(counts_LE, 1), slots_LP, axis=1)
    bounds = np.cumsum((0, *placement.slots_of_ranks))
    loads_LR: Floats = np.zeros((len(slots_LP), placement.num_ranks))
    for rank, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        loads_LR[:, rank] = share_LP[:, start:end].sum(axis=1)
    return loads_LR


def balancedness(loads_LR: npt.NDArray[Any]) -> Floats:
    """[L]: mean over ranks / max over ranks, in (0, 1]; 1 is perfect, and a layer without load is.

    Example: loads 2 and 6 give 4 / 6.
    """
    most_L = loads_LR.max(axis=1, initial=0)
    mean_L = loads_LR.mean(axis=1) if loads_LR.shape[1] else most_L
    even_L: Floats = np.divide(mean_L, most_L, out=np.ones(len(loads_LR)), where=most_L > 0)
    return even_L


def replica_counts(slots_LP: npt.NDArray[Any], num_experts: int) -> npt.NDArray[np.int64]:
    """[L, E]: in how many slots each logical expert lies."""
    num_layers = len(slots_LP)
    flat = (slots_LP + np.arange(num_layers)[:, None] * num_experts).ravel()
    return np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def check_loads(load_LE: npt.NDArray[Any]) -> None:
    """Raises `PlacementError` unless `load_LE` is a matrix of finite numbers from 0 up."""
    if load_LE.ndim != 2 or load_LE.dtype.kind not in "biuf":
        raise PlacementError(
            f"loads are {load_LE.dtype} of shape {load_LE.shape}: wanted numbers, layers x experts"
        )
    wrong_LE = ~np.isfinite(load_LE) | (load_LE < 0)
    if wrong_LE.any():
        layer, expert = np.argwhere(wrong_LE)[0].tolist()
        raise PlacementError(
            f"load of layer {layer}, expert {expert} is {load_LE[layer, expert]}: "
            "wanted a finite number from 0 up"
        )
