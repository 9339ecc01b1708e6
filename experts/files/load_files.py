"""Load recordings as files: our own, SGLang's dump, and plain counts.

Our own, `.json` and `.npz` (there a section's field is named "placement.slots"):

    format "moe_serve.expert_load", version 1
    model, top_k, num_layers, num_experts, num_ranks, expert_bytes
    phases         the C of `recording.PHASES` that had tokens
    counts         [windows, C, layers, experts]
    tokens         [windows, C]
    steps, seconds [windows]
    rank_rows      [windows, layers, ranks]; 0 ranks where they are not known
    placement      as in `placement_files`, or null
    windows_placed so many windows, the last, are under it; left out where that is not known
    cost           read_seconds, row_seconds, source, or null
    has_tokens     false where tokens are told from counts; else absent

SGLang's, `.pt`: `logical_count` [layers, experts] or [steps, layers, experts], beside `rank` and
`average_utilization_rate_over_window` (python/sglang/srt/eplb/expert_distribution.py, the "stat"
mode; expert_location.py reads `logical_count` alone). Its rows are a ring buffer of steps, zeros
where none was, and its layers are all of the model's: a layer of zeros is no MoE layer.

Plain counts, `.json`: `counts` {name: [layers][experts]}, `top_k`, and perhaps `model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.experts.files.documents import Document, plain, read_document, write_document
from moe_serve.experts.files.placement_files import placement_of, placement_values
from moe_serve.experts.recording import PHASES, Ints, LoadRecording
from moe_serve.experts.step_cost import StepCost

# Shapes: W windows, C phases, L MoE layers, E logical experts, R ranks, N steps.

FORMAT = "moe_serve.expert_load"
VERSION = 1
# Far beyond any model; a file must not make arrays of any size by a number alone.
MAX_SIZES = {"num_layers": 4096, "num_experts": 2**15, "num_ranks": 2**15}


def to_json(recording: LoadRecording) -> dict[str, Any]:
    """Our own format, in plain values."""
    document: dict[str, Any] = plain(_values(recording))
    return document


def from_json(values: Mapping[str, Any], source: str = "expert load") -> LoadRecording:
    """Raises `RecordingError`, or `PlacementError`, that begins with `source`."""
    return _ours(Document(values, source))


def write_load(recording: LoadRecording, path: str | Path) -> None:
    """`.json` and `.npz` are our own format, `.pt` is SGLang's: a row a window, without phases.

    Raises `RecordingError` where the file cannot be written.
    """
    is_sglang = Path(path).suffix.lower() == ".pt"
    write_document(_sglang_values(recording) if is_sglang else _values(recording), path)


def read_load(path: str | Path, *, top_k: int | None = None) -> LoadRecording:
    """A file in any of the formats above. `top_k` is for one that does not tell.

    Raises `RecordingError`, or `PlacementError`, that names the file.
    """
    document = read_document(path)
    if "format" in document:
        recording = _ours(document)
    elif "logical_count" in document:
        recording = _sglang(document, _top_k(document, top_k))
    elif "counts" in document:
        recording = _plain_counts(document, _top_k(document, top_k))
    elif "records" in document:
        raise document.error("records of single steps are not read; dump with the mode 'stat'")
    else:
        raise document.error(
            f"no expert load: it has neither format {FORMAT!r}, logical_count, nor counts"
        )
    if top_k not in (None, recording.top_k):
        raise document.error(f"top_k is {recording.top_k} in the file, but {top_k} was given")
    return recording


def _values(recording: LoadRecording) -> dict[str, Any]:
    counts_WCLE, tokens_WC = recording.counts_WCLE, recording.tokens_WC
    used = [i for i in range(len(PHASES)) if tokens_WC[:, i].any() or counts_WCLE[:, i].any()]
    cost, placement = recording.cost, recording.placement
    values = {
        "format": FORMAT,
        "version": VERSION,
        "model": recording.model,
        "top_k": recording.top_k,
        "num_layers": recording.num_layers,
        "num_experts": recording.num_experts,
        "num_ranks": recording.rows_WLR.shape[2],
        "expert_bytes": recording.expert_bytes,
        "phases": [PHASES[i] for i in used],
        "counts": counts_WCLE[:, used],
        "tokens": tokens_WC[:, used],
        "steps": recording.steps_W,
        "seconds": recording.seconds_W,
        "rank_rows": recording.rows_WLR,
        "placement": None if placement is None else placement_values(placement),
        "cost": None if cost is None else _cost_values(cost),
    }
    if recording.windows_placed is not None:
        values["windows_placed"] = recording.windows_placed
    return values if recording.has_tokens else values | {"has_tokens": False}


def _cost_values(cost: StepCost) -> dict[str, Any]:
    return {
        "read_seconds": cost.read_seconds,
        "row_seconds": cost.row_seconds,
        "source": cost.source,
    }


def _ours(document: Document) -> LoadRecording:
    document.check_format(FORMAT, VERSION)
    L, E, R = (document.whole(name, most=most) for name, most in MAX_SIZES.items())
    seconds_W = document.numbers("seconds", (None,))
    W = len(seconds_W)
    used = _phases(document)
    counts_WCLE = np.zeros((W, len(PHASES), L, E), dtype=np.int64)
    tokens_WC = np.zeros((W, len(PHASES)), dtype=np.int64)
    counts_WCLE[:, used] = document.integers("counts", (W, len(used), L, E))
    tokens_WC[:, used] = document.integers("tokens", (W, len(used)))
    placement = None
    if "placement" in document:
        placement = placement_of(document.section("placement"), num_layers=L, num_experts=E)
    return LoadRecording(
        model=document.text("model"),
        top_k=document.whole("top_k", least=1),
        counts_WCLE=counts_WCLE,
        tokens_WC=tokens_WC,
        steps_W=document.integers("steps", (W,)),
        seconds_W=seconds_W,
        rows_WLR=document.integers("rank_rows", (W, L, R)),
        placement=placement,
        windows_placed=document.whole("windows_placed", most=W)
        if "windows_placed" in document
        else None,
        expert_bytes=document.whole("expert_bytes"),
        cost=_cost(document.section("cost")) if "cost" in document else None,
        has_tokens="has_tokens" not in document or document.get("has_tokens") is not False,
    )


def _phases(document: Document) -> list[int]:
    names = plain(document.get("phases"))
    if not isinstance(names, list) or len(set(map(str, names))) < len(names):
        raise document.error("phases must be a list of different names")
    for name in names:
        if name not in PHASES:
            raise document.error(f"phases: {name!r} must be one of {', '.join(PHASES)}")
    return [PHASES.index(name) for name in names]


def _cost(section: Document) -> StepCost:
    return StepCost(
        read_seconds=section.number("read_seconds"),
        row_seconds=section.number("row_seconds"),
        source=section.text("source"),
    )


def _sglang_values(recording: LoadRecording) -> dict[str, Any]:
    return {
        "rank": 0,
        "logical_count": recording.counts_WCLE.sum(1),
        "average_utilization_rate_over_window": None,
        # Not SGLang's, which ignores what it does not know. A row of ours is a window, not a step.
        "model": recording.model,
        "top_k": recording.top_k,
        "num_steps": recording.num_steps,
        "seconds": float(recording.seconds_W.sum()),
    }


def _sglang(document: Document, top_k: int) -> LoadRecording:
    is_one_step = np.ndim(document.get("logical_count")) == 2
    shape = (None, None) if is_one_step else (None, None, None)
    counts = document.integers("logical_count", shape)
    counts_NLE = counts[None] if is_one_step else counts
    counts_LE = counts_NLE.sum(0)
    if counts_LE.any():
        counts_LE = counts_LE[counts_LE.any(1)]
    num_steps = 0 if is_one_step else int(counts_NLE.any((1, 2)).sum())
    if "num_steps" in document:
        num_steps = document.whole("num_steps")
    seconds = document.number("seconds") if "seconds" in document else 0.0
    recording = _of_counts(document, counts_LE[None], top_k)
    return dataclasses.replace(
        recording, steps_W=np.array([num_steps]), seconds_W=np.array([seconds])
    )


def _plain_counts(document: Document, top_k: int) -> LoadRecording:
    section = document.section("counts")
    counts = [section.integers(name, (None, None)) for name in section.names]
    if not counts:
        raise document.error("counts are empty")
    for name, counts_LE in zip(section.names, counts, strict=True):
        if counts_LE.shape != counts[0].shape:
            raise section.error(
                f"{name} has shape {list(counts_LE.shape)}, but {section.names[0]} has "
                f"{list(counts[0].shape)}"
            )
    return _of_counts(document, np.stack(counts), top_k)


def _of_counts(document: Document, counts_WLE: Ints, top_k: int) -> LoadRecording:
    """Counts that tell neither phase nor tokens: all are prefill, and sums tell the tokens."""
    W, L, E = counts_WLE.shape
    sums_WL = counts_WLE.sum(2)
    odd = np.argwhere(sums_WL % top_k)
    if len(odd):
        window, layer = odd[0].tolist()
        raise document.error(
            f"the counts of layer {layer} sum to {sums_WL[window, layer]}, which is no multiple "
            f"of top_k {top_k}"
        )
    counts_WCLE = np.zeros((W, len(PHASES), L, E), dtype=np.int64)
    tokens_WC = np.zeros((W, len(PHASES)), dtype=np.int64)
    counts_WCLE[:, 0] = counts_WLE
    # Where layers differ, which no engine's should, the recording shows it: it is not conserved.
    tokens_WC[:, 0] = sums_WL.max(1, initial=0) // top_k
    return LoadRecording(
        model=document.text("model") if "model" in document else Path(document.source).stem,
        top_k=top_k,
        counts_WCLE=counts_WCLE,
        tokens_WC=tokens_WC,
        steps_W=np.zeros(W, dtype=np.int64),
        seconds_W=np.zeros(W),
        rows_WLR=np.zeros((W, L, 0), dtype=np.int64),
        has_tokens=False,
    )


def _top_k(document: Document, given: int | None) -> int:
    if "top_k" in document:
        return document.whole("top_k", least=1)
    if given is None:
        raise document.error("top_k is missing; say how many experts a token chooses")
    return given
