"""Recordings to try things on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.experts.recording import PHASES, LoadRecording, RouteRecording
from moe_serve.experts.step_cost import StepCost

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "expert_load"


def data_file(name: str) -> Path:
    """Skips the test where the published recordings are not beside the clone."""
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not here")
    return DATA / name


def random_routes(
    seed: int, num_tokens: int, num_layers: int, num_experts: int, top_k: int
) -> RouteRecording:
    """Skewed: low experts are chosen more."""
    random = np.random.default_rng(seed)
    scores = random.gumbel(size=(num_tokens, num_layers, num_experts))
    scores -= 1.5 * np.log1p(np.arange(num_experts))
    ids_TLK = np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.int16)
    first = num_tokens // 3
    return RouteRecording(
        model="tiny",
        num_experts=num_experts,
        ids_TLK=ids_TLK,
        request_lengths=(first, 0, num_tokens - first),
        phases_T=random.integers(0, len(PHASES), num_tokens).astype(np.int8),
    )


def random_placement(
    seed: int, num_layers: int, num_experts: int, num_ranks: int, num_redundant: int
) -> Placement:
    """Another order in each layer."""
    random = np.random.default_rng(seed)
    even = Placement.make(num_layers, num_experts, num_ranks, num_redundant=num_redundant)
    layers = []
    for layer in even.layers:
        names = random.permutation(num_experts).tolist()
        layers.append(LayerPlacement(tuple(tuple(names[e] for e in own) for own in layer.experts)))
    return Placement(tuple(layers))


def make_recording(counts_LE: Any, **changes: Any) -> LoadRecording:
    """One window of prefill with these counts, top-1 unless told."""
    counts_LE = np.asarray(counts_LE, dtype=np.int64)
    layers = len(counts_LE)
    counts_WCLE = np.zeros((1, len(PHASES), *counts_LE.shape), dtype=np.int64)
    counts_WCLE[0, 0] = counts_LE
    tokens = int(counts_LE.sum(1).max(initial=0)) // changes.get("top_k", 1)
    fields: dict[str, Any] = {
        "model": "tiny",
        "top_k": 1,
        "counts_WCLE": counts_WCLE,
        "tokens_WC": np.array([[tokens, 0, 0]]),
        "steps_W": np.array([0]),
        "seconds_W": np.array([0.0]),
        "rows_WLR": np.zeros((1, layers, 0), dtype=np.int64),
    }
    return LoadRecording(**fields | changes)


@st.composite
def recordings(draw: st.DrawFn) -> LoadRecording:
    """Of any shape, with and without placement, measured rows and cost; conserved."""
    top_k, num_experts, num_layers = draw(st.sampled_from([(1, 1, 1), (2, 7, 2), (3, 17, 1)]))
    windows = [
        random_routes(draw(st.integers(0, 99)), tokens, num_layers, num_experts, top_k)
        for tokens in draw(st.lists(st.sampled_from([0, 1, 7, 17]), max_size=3))
    ]
    W, C, L, E = len(windows), len(PHASES), num_layers, num_experts
    counts_WCLE = np.zeros((W, C, L, E), dtype=np.int64)
    tokens_WC = np.zeros((W, C), dtype=np.int64)
    for window, routes in enumerate(windows):
        for ids_LK, phase in zip(routes.ids_TLK, routes.phases_T, strict=True):
            tokens_WC[window, phase] += 1
            for layer, ids in enumerate(ids_LK):
                counts_WCLE[window, phase, layer, ids] += 1
    num_ranks = draw(st.integers(1, 3))
    spare = draw(st.integers(0, E * (num_ranks - 1)))
    has_ranks = draw(st.booleans())
    numbers = st.floats(0, 1e6)
    return LoadRecording(
        model=draw(st.text(max_size=5).filter(lambda text: "\0" not in text)),
        top_k=top_k,
        counts_WCLE=counts_WCLE,
        tokens_WC=tokens_WC,
        steps_W=np.arange(W) * 3,
        seconds_W=np.array([draw(numbers) for _ in range(W)]),
        rows_WLR=np.arange(W * L * num_ranks).reshape(W, L, num_ranks)
        if has_ranks
        else np.zeros((W, L, 0), dtype=np.int64),
        placement=random_placement(1, L, E, num_ranks, spare) if has_ranks else None,
        windows_placed=draw(st.none() | st.integers(0, W)),
        expert_bytes=draw(st.integers(0, 2**40)),
        cost=draw(
            st.none()
            | st.builds(
                StepCost, read_seconds=numbers, row_seconds=numbers, source=st.just("measured")
            )
        ),
    )


def assert_same_recording(first: LoadRecording, second: LoadRecording) -> None:
    for name in LoadRecording.__dataclass_fields__:
        expected, found = getattr(first, name), getattr(second, name)
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(found, expected, err_msg=name, strict=True)
        else:
            assert found == expected, name
