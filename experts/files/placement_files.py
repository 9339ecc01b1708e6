"""Placements as files: our own, SGLang's, EPLB's and TensorRT-LLM's.

    style        suffix            fields
    moe_serve    .json .npz        format "moe_serve.expert_placement", version 1,
                                   num_experts, slots_of_ranks [ranks], slots [layers, slots]
    sglang       .json .pt         physical_to_logical_map [layers, slots], and perhaps
                                   logical_to_physical_map [layers, experts, most replicas]
    eplb         .json .npz .pt    phy2log [layers, slots], logcnt [layers, experts],
                                   log2phy [layers, experts, most replicas]
    tensorrt_llm .yaml .yml        num_slots, initial_global_assignments {layer: [expert of slot]}

Slots are numbered rank by rank; maps by expert are padded with -1. Only our own file tells the
ranks: the others have slots spread over them evenly. SGLang reads its map alone and refuses a
field beside it (python/sglang/srt/eplb/expert_location.py), so its style is written without the
inverse.

A layer here is a MoE layer. SGLang's map has a row for each layer of the model, dense ones too (its
models tell num_hidden_layers as num_layers), and TensorRT-LLM numbers all layers but lists MoE ones
alone (examples/ep_load_balancer/generate_eplb_config.py). Of a model with dense layers the former
is therefore refused, and the latter read in order; what is written in either style, MoE layers as
0, 1 ..., they understand for models without dense layers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from moe_serve.errors import PlacementError, RecordingError
from moe_serve.experts.analysis.load_statistics import replica_counts
from moe_serve.experts.files.documents import Document, read_document, write_document
from moe_serve.experts.placement import Placement, slots_of_ranks
from moe_serve.experts.recording import Ints

# Shapes: L MoE layers, E logical experts, P slots of all ranks, X most replicas of an expert.

FORMAT = "moe_serve.expert_placement"
VERSION = 1
MAX_SLOTS = 2**20
_SLOT_FIELDS = ("physical_to_logical_map", "phy2log", "initial_global_assignments")
Style = Literal["moe_serve", "sglang", "eplb", "tensorrt_llm"]
SUFFIXES: dict[Style, tuple[str, ...]] = {
    "moe_serve": (".json", ".npz"),
    "sglang": (".json", ".pt"),
    "eplb": (".json", ".npz", ".pt"),
    "tensorrt_llm": (".yaml", ".yml"),
}


class PlacementMaps(NamedTuple):
    """Slot -> expert, expert -> its slots in order (padded with -1), expert -> number of slots."""

    slots_LP: Ints
    slots_of_LEX: Ints
    replicas_LE: Ints


def placement_maps(placement: Placement) -> PlacementMaps:
    """Example, experts 0 1 | 1 2 on two ranks: [0 1 1 2], [[0 -1] [1 2] [3 -1]], [1 2 1]."""
    slots_LP = placement.slots_LP.astype(np.int64)
    replicas_LE = replica_counts(placement)
    most = int(replicas_LE.max(initial=0))
    slots_of_LEX = np.full((*replicas_LE.shape, most), -1, dtype=np.int64)
    order_LP = np.argsort(slots_LP, axis=1, kind="stable")
    for layer, order_P in enumerate(order_LP):
        experts_P = slots_LP[layer, order_P]
        firsts_E = np.cumsum(replicas_LE[layer]) - replicas_LE[layer]
        slots_of_LEX[layer, experts_P, np.arange(len(order_P)) - firsts_E[experts_P]] = order_P
    return PlacementMaps(slots_LP, slots_of_LEX, replicas_LE)


def placement_values(placement: Placement) -> dict[str, Any]:
    """The fields of our own format."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "num_experts": placement.num_experts,
        "slots_of_ranks": np.array(placement.slots_of_ranks, dtype=np.int64),
        "slots": placement.slots_LP,
    }


def placement_of(
    document: Document, *, num_layers: int | None = None, num_experts: int | None = None
) -> Placement:
    """Our own format. Raises `RecordingError` or `PlacementError` that names the source."""
    document.check_format(FORMAT, VERSION)
    counts_R = document.integers("slots_of_ranks", (None,), below=MAX_SLOTS)
    own = document.whole("num_experts")
    slots_LP = document.integers("slots", (None, int(counts_R.sum())), below=own)
    if num_experts not in (None, own):
        raise PlacementError(f"{document.source} is for {own} experts, not {num_experts}")
    return _checked(document, slots_LP, counts_R.tolist(), num_layers, own)


def write_placement(placement: Placement, path: str | Path, style: Style = "moe_serve") -> None:
    """Raises `RecordingError` for a name that the style does not have, or an unwritable file, and
    `PlacementError` for ranks that differ in slots, in another style than ours."""
    if style not in get_args(Style):
        raise RecordingError(f"style {style!r} must be one of {', '.join(get_args(Style))}")
    if Path(path).suffix.lower() not in SUFFIXES[style]:
        allowed = " or ".join(SUFFIXES[style])
        raise RecordingError(f"{path}: the name of a file in style {style} must end in {allowed}")
    counts = placement.slots_of_ranks
    if style != "moe_serve" and len(set(counts)) > 1:
        raise PlacementError(
            f"{path}: style {style} has the same number of slots on each rank, not {counts}"
        )
    maps = placement_maps(placement)
    values: dict[Style, dict[str, Any]] = {
        "moe_serve": placement_values(placement),
        "sglang": {"physical_to_logical_map": maps.slots_LP},
        "eplb": {
            "phy2log": maps.slots_LP,
            "log2phy": maps.slots_of_LEX,
            "logcnt": maps.replicas_LE,
        },
        "tensorrt_llm": {
            "num_slots": placement.num_slots,
            "initial_global_assignments": dict(enumerate(maps.slots_LP)),
        },
    }
    write_document(values[style], path)


def is_placement(path: str | Path) -> bool:
    """Whether `read_placement`, rather than `load_files.read_load`, is for this file.

    Raises `RecordingError` where it cannot be read at all.
    """
    document = read_document(path)
    return document.has_format(FORMAT) or any(name in document for name in _SLOT_FIELDS)


def read_placement(
    path: str | Path,
    num_ranks: int,
    *,
    num_layers: int | None = None,
    num_experts: int | None = None,
) -> Placement:
    """A file in any style, for `num_ranks`, and for a model of these sizes where they are given.

    Raises `RecordingError` where the file is not such a file, `PlacementError` where what it says
    cannot be; both name it.
    """
    document = read_document(path)
    if "format" in document:
        placement = placement_of(document, num_layers=num_layers, num_experts=num_experts)
        if placement.num_ranks != num_ranks:
            raise PlacementError(f"{path} is for {placement.num_ranks} ranks, not {num_ranks}")
        return placement
    slots_LP = _slots(document)
    counts = slots_of_ranks(slots_LP.shape[1], num_ranks)
    placement = _checked(document, slots_LP, list(counts), num_layers, num_experts)
    for name in ("logical_to_physical_map", "log2phy"):
        if name in document:
            _check_inverse(document, name, placement)
    if "logcnt" in document:
        _check_counts(document, placement)
    return placement


def _slots(document: Document) -> Ints:
    for name in ("physical_to_logical_map", "phy2log"):
        if name in document:
            return document.integers(name, (None, None))
    if "initial_global_assignments" in document:
        return _assigned_slots(document)
    raise document.error(
        f"no placement: it has neither format {FORMAT!r}, physical_to_logical_map, phy2log, nor "
        "initial_global_assignments"
    )


def _assigned_slots(document: Document) -> Ints:
    num_slots = document.whole("num_slots", least=1)
    by_layer = document.get("initial_global_assignments")
    is_map = isinstance(by_layer, dict) and all(type(layer) is int for layer in by_layer)
    if not is_map:
        raise document.error("initial_global_assignments must map layer numbers to lists")
    section = Document({str(k): v for k, v in sorted(by_layer.items())},
                       f"{document.source}: initial_global_assignments")  # fmt: skip
    rows = [section.integers(name, (num_slots,)) for name in section.names]
    return np.array(rows, dtype=np.int64).reshape(len(rows), num_slots)


def _checked(
    document: Document,
    slots_LP: Ints,
    counts: list[int],
    num_layers: int | None,
    num_experts: int | None,
) -> Placement:
    source = document.source
    if num_layers is not None and len(slots_LP) != num_layers:
        dense = "; rows of dense layers must be left out" if len(slots_LP) > num_layers else ""
        raise PlacementError(
            f"{source} places the experts of {len(slots_LP)} layers; the model has {num_layers} "
            f"MoE layers{dense}"
        )
    num_slots = slots_LP.shape[1]
    if num_experts is not None and num_experts > num_slots:
        raise PlacementError(f"{source}: {num_slots} slots do not hold {num_experts} experts")
    # One large number must not make a long list of missing experts.
    limit = num_slots if num_experts is None else num_experts
    wrong = np.argwhere(slots_LP >= limit)
    if len(wrong):
        layer, slot = wrong[0].tolist()
        least = f"{limit} slots" if num_experts is None else f"{limit} experts"
        raise PlacementError(
            f"{source}: layer {layer} has expert {slots_LP[layer, slot]} in slot {slot}; of "
            f"{least} the last is {limit - 1}"
        )
    try:
        placement = Placement.of_slots(slots_LP, counts)
    except PlacementError as error:
        raise PlacementError(f"{source}: {error}") from None
    expected = num_experts or placement.num_experts
    for layer, own in enumerate(placement.layers):
        if own.num_experts < expected:
            raise PlacementError(f"{source}: layer {layer}: expert {expected - 1} has no rank")
    return placement


def _check_inverse(document: Document, name: str, placement: Placement) -> None:
    """That the map by expert says the same; in which order it lists the slots is free."""
    maps = placement_maps(placement)
    shape = (placement.num_layers, placement.num_experts, None)
    found_LEX = document.integers(name, shape, least=-1, below=placement.num_slots)
    most = max(found_LEX.shape[2], maps.slots_of_LEX.shape[2])
    found, expected = (
        np.sort(np.pad(m, ((0, 0), (0, 0), (0, most - m.shape[2])), constant_values=-1))
        for m in (found_LEX, maps.slots_of_LEX)
    )
    wrong = np.argwhere((found != expected).any(2))
    if len(wrong):
        layer, expert = wrong[0].tolist()
        raise PlacementError(
            f"{document.source}: {name} disagrees with the slots on expert {expert} of layer "
            f"{layer}: {[slot for slot in found_LEX[layer, expert].tolist() if slot >= 0]}, not "
            f"{[slot for slot in maps.slots_of_LEX[layer, expert].tolist() if slot >= 0]}"
        )


def _check_counts(document: Document, placement: Placement) -> None:
    replicas_LE = replica_counts(placement)
    found_LE = document.integers("logcnt", replicas_LE.shape)
    wrong = np.argwhere(found_LE != replicas_LE)
    if len(wrong):
        layer, expert = wrong[0].tolist()
        raise PlacementError(
            f"{document.source}: logcnt says {found_LE[layer, expert]} slots for expert {expert} "
            f"of layer {layer}; it has {replicas_LE[layer, expert]}"
        )
