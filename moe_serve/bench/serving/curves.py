"""How latencies are spread, as a picture: the share of requests that had no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_serve.bench.plots import Chart, Series, svg
from moe_serve.bench.serving.outcome import Outcome

_MOST_POINTS = 200


def latency_curves(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """SVG text; `outcomes`: of all runs, by the name of the server. Failed ones are left out."""
    good = {name: [each for each in some if each.error is None] for name, some in outcomes.items()}
    charts = {
        "Time to first token": {name: [o.ttft for o in some] for name, some in good.items()},
        "Time per output token": {
            name: [o.tpot for o in some if o.tpot is not None] for name, some in good.items()
        },
    }
    return svg(
        [
            Chart(
                title=title,
                x_label="ms, logarithmic",
                y_label="% of requests",
                log_x=True,
                series=[Series(name, shares(times), "line") for name, times in by_name.items()],
            )
            for title, by_name in charts.items()
        ]
    )


def shares(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """(ms, % of values that are no larger), thinned out evenly, the ends kept.

    shares([3, 1]) -> (1000, 50), (3000, 100)
    """
    ordered = sorted(seconds)
    total = len(ordered)
    count = min(total, _MOST_POINTS)
    ranks = [round(number * (total - 1) / max(1, count - 1)) for number in range(count)]
    return [(ordered[rank] * 1000, 100 * (rank + 1) / total) for rank in ranks]
