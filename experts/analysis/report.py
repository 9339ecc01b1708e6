"""All that is worth knowing of a load recording, as one JSON document. Pure.

    format "moe_serve.expert_report", version 1
    summary       sentences for people, the most telling first
    model, top_k, num_layers, num_experts, num_windows, num_steps, seconds
    tokens        {"prefill", "decode", "recomputed", "total"}
    conservation  holds; expected: choices of each layer, tokens x top_k; wrong_layers; is_proof:
                  whether tokens were counted, not told from choices
    load          [layers][experts]: how often each was chosen
    experts       entropy, gini, hottest (x mean), hot_share {k: share of the k hottest}: mean and
                  extreme over layers and by layer; dead [layers]: experts never chosen
    hot           the hottest: layer, expert, load, x_mean (of its layer), ranks that hold it
    ranks         null without placement, else num_ranks, num_slots, num_redundant,
                  slots_of_ranks, sole_experts (by rank: of all layers, those that no other rank
                  holds), placement ("recorded", or "linear, assumed"), source of the load
                  ("measured": rows that ranks computed; "predicted": by the placement, where they
                  are not known or experts moved meanwhile),
                  load [layers][ranks], balancedness (mean, min, worst_layer, layers), busiest
                  (rank with most load of all layers; x_mean: load of the busiest rank of each
                  layer over that of the mean one, layers added up)
    cost          null where it is not known, else an estimate in ms a step, of the load as the
                  placement spreads it: expert_ms of the slowest ranks; lost_ms of it to imbalance
                  (slowest - mean over ranks), also as a share of expert_ms and of the measured
                  step_ms, and by layer
    rebalancing   placements by name ("now" first), where replicas share evenly: balancedness,
                  expert_ms, moves (experts that a rank has to be sent), moved_bytes,
                  more_bytes_of_rank
    drift         null without baseline, else distance of shares (0 to 1) mean, max and by layer,
                  and the experts whose share moved most
    notes         what was assumed, and what is not known

Layers are MoE layers, from 0. Shares and balancedness are 0 to 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_serve.errors import RecordingError
from moe_serve.experts.analysis import load_statistics
from moe_serve.experts.analysis.load_statistics import Floats
from moe_serve.experts.analysis.rank_report import cost_part, rank_part, rebalancing_part
from moe_serve.experts.analysis.report_summary import shares_evenly, summary
from moe_serve.experts.analysis.selection import check_same_model
from moe_serve.experts.placement import Placement, check_redundant
from moe_serve.experts.recording import PHASES, LoadRecording

# Shapes: W windows, C phases, L MoE layers, E logical experts.

FORMAT = "moe_serve.expert_report"
VERSION = 1
HOT_EXPERTS = 20
HOT_SHARES = (1, 4, 8)


def build_report(
    recording: LoadRecording,
    *,
    baseline: LoadRecording | None = None,
    num_ranks: int | None = None,
    num_redundant: int = 0,
) -> dict[str, Any]:
    """The document above, of plain values.

    `num_ranks` asks for a linear placement with `num_redundant` on so many ranks, in place of the
    recording's own. Raises `RecordingError` for a baseline of another model, `PlacementError` for
    more redundant experts than fit.
    """
    if not recording.counts_LE.size:
        raise RecordingError(
            f"{recording.model} has no MoE layers with experts: there is no expert load"
        )
    if baseline is not None:
        check_same_model(recording, baseline, "the load and its baseline")
    placement, notes = _placement(recording, num_ranks, num_redundant)
    counts_LE = recording.counts_LE
    source = "recorded" if num_ranks is None else "linear, assumed"
    report: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "summary": [],
        **_totals(recording),
        "conservation": _conservation(recording),
        "load": counts_LE.tolist(),
        "experts": _experts(counts_LE),
        "hot": _hot(recording, placement),
        "ranks": rank_part(recording, placement, source) if placement is not None else None,
        "cost": cost_part(recording, placement) if placement is not None else None,
        "rebalancing": rebalancing_part(recording, placement) if placement is not None else [],
        "drift": None if baseline is None else _drift(baseline, recording),
        "notes": notes,
    }
    notes += _notes(recording, baseline, placement) + _rank_notes(report, recording, placement)
    report["summary"] = summary(report)
    return report


def _placement(
    recording: LoadRecording, num_ranks: int | None, num_redundant: int
) -> tuple[Placement | None, list[str]]:
    if num_ranks is None:
        if recording.placement is None:
            return None, [
                "Load over ranks is not shown: the recording is of no expert parallelism, or does "
                "not tell where experts lie. A number of ranks can be assumed."
            ]
        return recording.placement, []
    check_redundant(recording.num_experts, num_redundant, num_ranks)
    placement = Placement.make(
        recording.num_layers, recording.num_experts, num_ranks, num_redundant=num_redundant
    )
    return placement, [
        f"Experts are assumed to lie in order on {num_ranks} ranks, with {num_redundant} redundant."
    ]


def _totals(recording: LoadRecording) -> dict[str, Any]:
    tokens_C = recording.tokens_WC.sum(0).tolist()
    return {
        "model": recording.model,
        "top_k": recording.top_k,
        "num_layers": recording.num_layers,
        "num_experts": recording.num_experts,
        "num_windows": len(recording.steps_W),
        "num_steps": recording.num_steps,
        "seconds": float(recording.seconds_W.sum()),
        "tokens": dict(zip(PHASES, tokens_C, strict=True)) | {"total": sum(tokens_C)},
    }


def _conservation(recording: LoadRecording) -> dict[str, Any]:
    sums_WCL = recording.counts_WCLE.sum(3)
    is_wrong_WCL = sums_WCL != recording.tokens_WC[:, :, None] * recording.top_k
    return {
        "holds": recording.is_conserved,
        "expected": int(recording.tokens_WC.sum()) * recording.top_k,
        "wrong_layers": np.flatnonzero(is_wrong_WCL.any((0, 1))).tolist(),
        "is_proof": recording.has_tokens,
    }


def _experts(counts_LE: load_statistics.Load) -> dict[str, Any]:
    num_experts = counts_LE.shape[1]
    return {
        "entropy": _spread(load_statistics.entropy(counts_LE), "min"),
        "gini": _spread(load_statistics.gini(counts_LE), "max"),
        "hottest": _spread(load_statistics.hottest_over_mean(counts_LE), "max"),
        "hot_share": {
            str(count): _spread(load_statistics.hot_share(counts_LE, count), "max")
            for count in HOT_SHARES
            if count < num_experts
        },
        "dead": load_statistics.dead_experts(counts_LE),
    }


def _spread(values_L: Floats, extreme: str) -> dict[str, Any]:
    """Mean and one extreme over layers, and all of them."""
    found = values_L.max() if extreme == "max" else values_L.min()
    return {"mean": float(values_L.mean()), extreme: float(found), "layers": values_L.tolist()}


def _hot(recording: LoadRecording, placement: Placement | None) -> list[dict[str, Any]]:
    hot = load_statistics.hot_list(recording.counts_LE, HOT_EXPERTS)
    return [expert._asdict() | {"ranks": _holders(placement, expert)} for expert in hot]


def _holders(placement: Placement | None, hot: load_statistics.HotExpert) -> list[int]:
    if placement is None:
        return []
    ranks = enumerate(placement.layers[hot.layer].experts)
    return [rank for rank, own in ranks if hot.expert in own]


def _drift(baseline: LoadRecording, recording: LoadRecording) -> dict[str, Any]:
    distance_L, moves = load_statistics.drift(baseline.counts_LE, recording.counts_LE, HOT_EXPERTS)
    return {
        "baseline": baseline.model,
        "baseline_tokens": int(baseline.tokens_WC.sum()),
        **_spread(distance_L, "max"),
        "moves": [move._asdict() for move in moves],
    }


def _rank_notes(
    report: dict[str, Any], recording: LoadRecording, placement: Placement | None
) -> list[str]:
    """What sets apart the rows of ranks from what placements would make of the load."""
    notes = []
    is_own = placement is not None and placement is recording.placement
    if is_own and recording.rows_WLR.any() and report["ranks"]["source"] == "predicted":
        notes.append(
            "Experts moved while this was recorded: load of ranks is not what they computed, but "
            "what it would be with all experts where they lay at the end."
        )
    if report["rebalancing"]:
        notes.append(
            "What rebalancing would give is judged by the very load that it is made for; the load "
            "to come will differ, and be less even."
        )
    if not shares_evenly(report):
        notes.append(
            "Replicas did not share their load evenly, as in small steps they cannot. Times, and "
            "what rebalancing would give, suppose that they do: with that, balancedness would be "
            f"{report['rebalancing'][0]['balancedness_mean']:.2f} now."
        )
    return notes


def _notes(
    recording: LoadRecording, baseline: LoadRecording | None, placement: Placement | None
) -> list[str]:
    notes = []
    if placement is not None and placement.num_ranks > 1:
        if recording.cost is None:
            notes.append("No times are shown: the recording does not tell what rows cost.")
        elif not recording.num_steps:
            notes.append("No times are shown: the recording does not tell its steps.")
        else:
            notes.append("Times are estimates, for a step with the mean number of rows.")
    if baseline is not None and baseline.model != recording.model:
        notes.append(f"The baseline is of another model, {baseline.model}.")
    return notes
