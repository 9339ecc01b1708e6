"""A plan as tables for a terminal, and as values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moe_serve.experts.analysis.plan import Outcome, Plan
from moe_serve.experts.analysis.step_time import TimeModel
from moe_serve.routing.traffic import BACKENDS

_LABELS = ["EP", "redundant", "placement"]
_SHORT = {"allgather_reducescatter": "allgather"}


def plan_table(plan: Plan, balanced_for: str) -> str:
    """Several tables, with a line for each layout, and a word on what they are.

    `balanced_for`: whose load balanced placements are made for.
    """
    routes = plan.routes
    parts = [
        f"{routes.model}: {routes.num_tokens:,} tokens of {len(routes.request_lengths):,} requests,"
        f" {routes.num_layers} MoE layers, {routes.num_experts} experts, {routes.top_k} per token\n"
        f"steps of {plan.batch_tokens:,} tokens: {plan.num_steps:,}; balanced for the load of "
        f"{balanced_for}",
        "Exact: how even the ranks are. Balancedness of all rows, over layers; in steps: of the\n"
        "rows of each layer and step. Rows that a rank computes, all layers.",
        _table(
            [*_LABELS, "balancedness\nmean", "\nlowest", "\nin steps", "rows\nmean", "\nmost",
             "\nleast"],
            plan, _balance_cells,
        ),
    ]  # fmt: skip
    if plan.model is None:
        parts += [_copies(plan), "No bytes, memory or times: they need the model's sizes; --config"]
    else:
        parts += [*_sent(plan), *_times(plan, plan.model)]
    best = plan.best.layout
    parts.append(
        f"{'Most even in its steps' if plan.model is None else 'Most tokens/s of all ranks'}: EP "
        f"{best.num_ranks}, {best.num_redundant} redundant, {best.source}."
    )
    return "\n\n".join(parts)


def plan_values(plan: Plan, balanced_for: str) -> dict[str, Any]:
    """Everything, for JSON; null where the model's sizes are not known."""
    routes, model = plan.routes, plan.model
    return {
        "model": routes.model,
        "num_tokens": routes.num_tokens,
        "num_layers": routes.num_layers,
        "num_experts": routes.num_experts,
        "top_k": routes.top_k,
        "batch_tokens": plan.batch_tokens,
        "num_steps": plan.num_steps,
        "balanced_for": balanced_for,
        "shape": None if model is None else dataclasses.asdict(model.shape),
        "hardware": None if model is None else dataclasses.asdict(model.hardware),
        "replica_expert_bytes": plan.replica_bytes if model else None,
        "layouts": [_values(outcome, routes.num_tokens) for outcome in plan.outcomes],
        "best": plan.outcomes.index(plan.best),
    }


def _values(outcome: Outcome, num_tokens: int) -> dict[str, Any]:
    timing, layout = outcome.timing, outcome.layout
    return {
        "ep": layout.num_ranks,
        "redundant": layout.num_redundant,
        "placement": layout.source,
        "balancedness": {
            "mean": outcome.balancedness_mean,
            "min": outcome.balancedness_min,
            "in_steps": outcome.step_balancedness,
        },
        "rows_of_ranks": outcome.rows_R,
        "tokens_sent_by_ranks": outcome.tokens_out_R,
        "results_sent_by_ranks": outcome.results_out_R,
        "bytes_sent": {
            name: {
                "per_token": sum(bytes_R) / num_tokens,
                "total": sum(bytes_R),
                "busiest_rank": max(bytes_R),
                "by_rank": bytes_R,
            }
            for name, bytes_R in outcome.bytes_out.items()
        }
        or None,
        "expert_bytes_of_ranks": outcome.expert_bytes_R or None,
        "estimated": None
        if timing is None
        else {
            "expert_seconds_per_step": timing.expert_seconds,
            "exchange_seconds_per_step": timing.exchange_seconds,
            "tokens_per_second": timing.tokens_per_second,
            "replica_tokens_per_second": timing.replica_tokens_per_second,
            "break_even_tokens_per_rank": timing.break_even._asdict()
            | {"text": str(timing.break_even)},
        },
    }


def _copies(plan: Plan) -> str:
    def cells(outcome: Outcome) -> list[str]:
        tokens, results = sum(outcome.tokens_out_R), sum(outcome.results_out_R)
        mean = plan.routes.num_tokens * plan.routes.num_layers
        return [
            f"{tokens / mean:.3f}", f"{max(outcome.tokens_out_R):,}",
            f"{results / mean:.3f}", f"{max(outcome.results_out_R):,}",
        ]  # fmt: skip

    head = [*_LABELS, "tokens sent\na token, layer", "\nbusiest rank",
            "results sent\na token, layer", "\nbusiest rank"]  # fmt: skip
    title = "Exact: rows that all_to_all sends to other ranks."
    return f"{title}\n\n{_table(head, plan, cells)}"


def _sent(plan: Plan) -> list[str]:
    def cells(outcome: Outcome) -> list[str]:
        return [
            text
            for name in BACKENDS
            for text in (
                _short(sum(outcome.bytes_out[name]) / plan.routes.num_tokens / 2**10),
                _short(sum(outcome.bytes_out[name]) / 2**20),
                _short(max(outcome.bytes_out[name]) / 2**20),
            )
        ]

    head = [
        title
        for name in BACKENDS
        for title in (f"{_SHORT.get(name, name)}\nKiB/token", "\nMiB", "\nbusiest")
    ]
    return [
        "Exact: sent between ranks by each backend, all layers: for a token; in all; and by the\n"
        "rank that sends most.",
        _table([*_LABELS, *head], plan, cells),
    ]


def _times(plan: Plan, model: TimeModel) -> list[str]:
    def cells(outcome: Outcome) -> list[str]:
        timing = outcome.timing
        assert timing is not None
        exchange = timing.exchange_seconds["auto"]
        return [
            f"{max(outcome.expert_bytes_R) / 1e9:,.2f}",
            f"{timing.expert_seconds * 1e3:,.3f}", f"{exchange * 1e3:,.3f}",
            f"{(timing.expert_seconds + exchange) * 1e3:,.3f}",
            f"{timing.tokens_per_second:,.0f}", f"{timing.replica_tokens_per_second:,.0f}",
            str(timing.break_even),
        ]  # fmt: skip

    shape, hardware = model.shape, model.hardware
    head = [
        "experts\nGB a rank",
        "ms a step\nexperts",
        "\nexchange",
        "\nboth",
        "tokens/s",
        "replicas'\ntokens/s",
        "beats\nreplicas",
    ]
    return [
        f"Memory of the fullest rank's experts ({shape.weight_dtype}) is exact; a whole copy is "
        f"{plan.replica_bytes / 1e9:,.2f} GB.\n"
        f"Times are estimates, of the MoE layers alone (no attention, no shared experts), backend "
        f"auto, on\n{hardware.name}: {hardware.flops:.4g} FLOP/s, {hardware.memory_bandwidth:.4g} "
        f"B/s of memory, {hardware.link_bandwidth:.4g} B/s to other ranks, "
        f"{hardware.message_seconds:.2g} s an exchange.\n"
        "replicas: as many whole copies, which never exchange, each with the tokens of one rank;\n"
        "beats replicas: the tokens per rank and step with which EP takes less time than they do;\n"
        f"the recording tells up to {_reach(plan)}.",
        _table([*_LABELS, *head], plan, cells),
    ]


def _reach(plan: Plan) -> str:
    """How many tokens per rank and step break-evens are told for."""
    found = {o.layout.num_ranks: o.timing.break_even.most for o in plan.outcomes if o.timing}
    return ", ".join(f"{most:,} with EP {num_ranks}" for num_ranks, most in found.items())


def _balance_cells(outcome: Outcome) -> list[str]:
    rows_R = outcome.rows_R
    return [
        f"{outcome.balancedness_mean:.3f}", f"{outcome.balancedness_min:.3f}",
        f"{outcome.step_balancedness:.3f}", f"{sum(rows_R) / len(rows_R):,.0f}",
        f"{max(rows_R):,}", f"{min(rows_R):,}",
    ]  # fmt: skip


def _table(head: Sequence[str], plan: Plan, cells: Callable[[Outcome], list[str]]) -> str:
    """Columns side by side, flush right; a title may have two lines."""
    titles = [title.rpartition("\n") for title in head]
    rows = [[above for above, _, _ in titles], [below for _, _, below in titles]]
    for outcome in plan.outcomes:
        layout = outcome.layout
        label = [str(layout.num_ranks), str(layout.num_redundant), layout.source]
        rows.append(label + cells(outcome))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (_line(row, widths) for row in rows if any(row))
    return "\n".join(lines)


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _line(row: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip()
