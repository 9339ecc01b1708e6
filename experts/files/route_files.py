"""Route recordings as files: our own, and the published arrays of ESFT.

Our own, `.npz`: format "moe_serve.expert_routes", version 1, model, num_experts,
ids [tokens, layers, top_k], request_lengths [requests], phases [tokens] (indices of
`recording.PHASES`).

ESFT's, `.npz`: for each task `<task>_ids` [tokens, layers, top_k] and `<task>_request_lengths`
(made from results/expert_scores of deepseek-ai/ESFT); tasks are joined in the order of the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_serve.errors import RecordingError
from moe_serve.experts.files.documents import Document, read_document, write_document
from moe_serve.experts.recording import PHASES, Ints, LoadRecording, RouteRecording

# Shapes: T tokens, L MoE layers, K top-k, E logical experts, C phases.

FORMAT = "moe_serve.expert_routes"
VERSION = 1
# Ids are int16.
MAX_EXPERTS = 2**15


def write_routes(routes: RouteRecording, path: str | Path) -> None:
    """Raises `RecordingError` for a name that does not end in .npz, or an unwritable file."""
    if Path(path).suffix.lower() != ".npz":
        raise RecordingError(f"{path}: the name of a file of routes must end in .npz")
    values = {
        "format": FORMAT,
        "version": VERSION,
        "model": routes.model,
        "num_experts": routes.num_experts,
        "ids": routes.ids_TLK,
        "request_lengths": np.array(routes.request_lengths, dtype=np.int64),
        "phases": routes.phases_T,
    }
    write_document(values, path)


def is_routes(path: str | Path) -> bool:
    """Whether `read_routes`, rather than `load_files.read_load`, is for this file.

    Raises `RecordingError` where it cannot be read at all.
    """
    document = read_document(path)
    return document.has_format(FORMAT) or any(name.endswith("_ids") for name in document.names)


def read_routes(path: str | Path, *, num_experts: int | None = None) -> RouteRecording:
    """`num_experts` is for files that do not tell; without it the highest id is the last expert.

    Raises `RecordingError` that names the file.
    """
    document = read_document(path)
    routes = _ours(document) if "format" in document else _esft(document, num_experts)
    if num_experts not in (None, routes.num_experts):
        raise document.error(
            f"num_experts is {routes.num_experts} in the file, but {num_experts} was given"
        )
    return routes


def load_of(routes: RouteRecording) -> LoadRecording:
    """What those tokens put on the experts, as one window; no steps and no times are known."""
    C, L, E = len(PHASES), routes.num_layers, routes.num_experts
    counts_CLE = np.zeros((C, L, E), dtype=np.int64)
    for phase in range(C):
        ids_TLK = routes.ids_TLK[routes.phases_T == phase]
        for layer in range(L):
            counts_CLE[phase, layer] = np.bincount(ids_TLK[:, layer].ravel(), minlength=E)
    return LoadRecording(
        model=routes.model,
        top_k=routes.top_k,
        counts_WCLE=counts_CLE[None],
        tokens_WC=np.bincount(routes.phases_T, minlength=C)[None].astype(np.int64),
        steps_W=np.zeros(1, dtype=np.int64),
        seconds_W=np.zeros(1),
        rows_WLR=np.zeros((1, L, 0), dtype=np.int64),
    )


def _ours(document: Document) -> RouteRecording:
    document.check_format(FORMAT, VERSION)
    num_experts = document.whole("num_experts", least=1, most=MAX_EXPERTS)
    ids_TLK = _ids(document, "ids", num_experts)
    return RouteRecording(
        model=document.text("model"),
        num_experts=num_experts,
        ids_TLK=ids_TLK.astype(np.int16),
        request_lengths=_lengths(document, "request_lengths", len(ids_TLK)),
        phases_T=document.integers("phases", (len(ids_TLK),), below=len(PHASES)).astype(np.int8),
    )


def _esft(document: Document, num_experts: int | None) -> RouteRecording:
    tasks = [name.removesuffix("_ids") for name in document.names if name.endswith("_ids")]
    if not tasks:
        raise document.error(f"no routes: it has neither format {FORMAT!r} nor arrays <task>_ids")
    ids = [_ids(document, f"{task}_ids", num_experts or MAX_EXPERTS) for task in tasks]
    for task, ids_TLK in zip(tasks, ids, strict=True):
        if ids_TLK.shape[1:] != ids[0].shape[1:]:
            raise document.error(
                f"{task}_ids has {list(ids_TLK.shape[1:])} layers and choices, but {tasks[0]}_ids "
                f"has {list(ids[0].shape[1:])}"
            )
    lengths = (
        _lengths(document, f"{task}_request_lengths", len(ids_TLK))
        for task, ids_TLK in zip(tasks, ids, strict=True)
    )
    ids_TLK = np.concatenate(ids)
    return RouteRecording(
        model=Path(document.source).stem,
        num_experts=num_experts or int(ids_TLK.max(initial=0)) + 1,
        ids_TLK=ids_TLK.astype(np.int16),
        request_lengths=tuple(length for task in lengths for length in task),
        phases_T=np.zeros(len(ids_TLK), dtype=np.int8),
    )


def _ids(document: Document, name: str, num_experts: int) -> Ints:
    ids_TLK = document.integers(name, (None, None, None), below=num_experts)
    sorted_TLK = np.sort(ids_TLK, axis=2)
    twice = np.argwhere(sorted_TLK[:, :, 1:] == sorted_TLK[:, :, :-1])
    if len(twice):
        token, layer, choice = twice[0].tolist()
        raise document.error(
            f"{name}: token {token} chose expert {sorted_TLK[token, layer, choice]} twice in "
            f"layer {layer}"
        )
    return ids_TLK


def _lengths(document: Document, name: str, num_tokens: int) -> tuple[int, ...]:
    lengths = document.integers(name, (None,)).tolist()
    if sum(lengths) != num_tokens:
        raise document.error(f"{name} sum to {sum(lengths)}, but there are {num_tokens} tokens")
    return tuple(lengths)
