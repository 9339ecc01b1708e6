"""Parts of load recordings, and several taken together. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moe_serve.errors import RecordingError
from moe_serve.experts.recording import PHASES, LoadRecording


def join(recordings: Sequence[LoadRecording]) -> LoadRecording:
    """The windows of all, one recording after another; placement and cost are the last one's.

    Measured rows are kept where all are of as many ranks. Raises `RecordingError` where the
    recordings are not of one model.
    """
    first, last = recordings[0], recordings[-1]
    for other in recordings[1:]:
        check_same_model(first, other, "recordings to be taken together")
    num_ranks = {recording.rows_WLR.shape[2] for recording in recordings}
    has_rows = len(num_ranks) == 1
    return dataclasses.replace(
        last,
        windows_placed=None,
        counts_WCLE=np.concatenate([recording.counts_WCLE for recording in recordings]),
        tokens_WC=np.concatenate([recording.tokens_WC for recording in recordings]),
        steps_W=np.concatenate([recording.steps_W for recording in recordings]),
        seconds_W=np.concatenate([recording.seconds_W for recording in recordings]),
        rows_WLR=np.concatenate(
            [r.rows_WLR if has_rows else r.rows_WLR[:, :, :0] for r in recordings]
        ),
        has_tokens=all(recording.has_tokens for recording in recordings),
    )


def of_phase(recording: LoadRecording, phase: str) -> LoadRecording:
    """The tokens of one of `PHASES` alone; steps and seconds stay those of all.

    Measured rows are of all phases together, so they are left out.
    """
    is_other_C = np.array([name != phase for name in PHASES])
    counts_WCLE, tokens_WC = recording.counts_WCLE.copy(), recording.tokens_WC.copy()
    counts_WCLE[:, is_other_C] = 0
    tokens_WC[:, is_other_C] = 0
    return dataclasses.replace(
        recording,
        counts_WCLE=counts_WCLE,
        tokens_WC=tokens_WC,
        rows_WLR=recording.rows_WLR[:, :, :0],
    )


def check_same_model(first: LoadRecording, second: LoadRecording, what: str) -> None:
    """Raises `RecordingError` where layers, experts or top-k differ."""
    for name, one, other in (
        ("MoE layers", first.num_layers, second.num_layers),
        ("experts", first.num_experts, second.num_experts),
        ("experts per token", first.top_k, second.top_k),
    ):
        if one != other:
            raise RecordingError(f"{what} differ in {name}: {one} and {other}")
