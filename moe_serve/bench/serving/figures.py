"""Numbers out of outcomes. Names are those of `vllm bench serve` where it has them."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_serve.bench.serving.goodput import Objectives
from moe_serve.bench.serving.outcome import Outcome
from moe_serve.bench.serving.runner import Observed

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
SPREADS = ("mean", *(f"p{each}" for each in PERCENTILES))

# Of a run: numbers by name, None where there is nothing to tell, and `errors`: text -> count.
Figures = dict[str, Any]


def figures(observed: Observed, objectives: Objectives | None = None) -> Figures:
    """All numbers of a run; throughputs are over its whole length, tokens of good answers only.

    Latencies are in ms, as `p50_ttft_ms`; ITL is over all gaps of all requests, the rest has one
    value a request. `*_delay_ms` tells how late requests were sent: what --max-concurrency held
    back, or the client; nothing where all are due at once. `short` counts good answers of fewer
    tokens than were asked for. Percentiles lie between the two nearest values, linearly.
    """
    good = [each for each in observed.outcomes if each.error is None]
    errors = collections.Counter(each.error for each in observed.outcomes if each.error is not None)
    seconds = observed.duration
    num_input, num_output = sum(o.num_input for o in good), sum(o.num_output for o in good)
    num_chunks = sum(each.num_chunks for each in good)
    met = None if objectives is None else sum(map(objectives.is_met, good))
    return {
        "duration": seconds,
        "completed": len(good),
        "failed": len(observed.outcomes) - len(good),
        "errors": dict(errors.most_common()),
        "short": sum(each.num_output < each.num_wanted for each in good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "tokens_per_chunk": num_output / num_chunks if num_chunks else None,
        "request_throughput": _rate(len(good), seconds),
        "request_goodput": None if met is None else _rate(met, seconds),
        "output_throughput": _rate(num_output, seconds),
        "total_token_throughput": _rate(num_input + num_output, seconds),
        "max_concurrent_requests": peak_concurrency(observed.outcomes),
        "client_cpu_seconds": observed.client_cpu_seconds,
        "client_cpu_share": _rate(observed.client_cpu_seconds, seconds),
        **_spread("ttft", [each.ttft for each in good]),
        **_spread("tpot", [each.tpot for each in good if each.tpot is not None]),
        **_spread("itl", [gap for each in good for gap in each.itl]),
        **_spread("e2el", [each.e2el for each in good]),
        **_spread("delay", _delays(observed.outcomes)),
    }


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests under way at once. One that ends as another starts is not beside it."""
    moves = [(each.sent, 1) for each in outcomes] + [(each.ended, -1) for each in outcomes]
    now = peak = 0
    for _, move in sorted(moves):
        now += move
        peak = max(peak, now)
    return peak


def _delays(outcomes: Sequence[Outcome]) -> list[float]:
    is_timed = any(each.due for each in outcomes)
    return [each.sent - each.due for each in outcomes] if is_timed else []


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each number, over the runs that have it; errors are added up."""
    errors: collections.Counter[str] = collections.Counter()
    for run in runs:
        errors.update(run["errors"])
    result: Figures = {"errors": dict(errors.most_common())}
    for name in runs[0]:
        if name != "errors":
            values = [run[name] for run in runs if run[name] is not None]
            result[name] = _median(values) if values else None
    return {name: result[name] for name in runs[0]}


def ratios(runs: Sequence[Figures], baseline: Sequence[Figures]) -> dict[str, float | None]:
    """Median over the runs of each number over that of the same run of `baseline`."""
    result: dict[str, float | None] = {}
    for name in runs[0]:
        if name == "errors":
            continue
        pairs = [(own[name], other[name]) for own, other in zip(runs, baseline, strict=True)]
        quotients = [own / other for own, other in pairs if own is not None and other]
        result[name] = statistics.median(quotients) if quotients else None
    return result


def _median(values: Sequence[float]) -> float:
    """A count stays one, where it can."""
    value = statistics.median(values)
    is_count = all(isinstance(each, int) for each in values) and value == int(value)
    return int(value) if is_count else value


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    keys = [f"{spread}_{name}_ms" for spread in SPREADS]
    if not seconds:
        return dict.fromkeys(keys)
    times = np.asarray(seconds) * 1000
    values = [float(times.mean()), *np.percentile(times, PERCENTILES).tolist()]
    return dict(zip(keys, values, strict=True))
