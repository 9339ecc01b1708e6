"""Prometheus metrics of what ranks move: of rank 0; each rank's own are in the report."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.api.engine import EngineClient

LABELS = ("model_name", "engine", "group", "operation")
COUNTERS = {
    "comm_calls": ("calls", "Collective calls of rank 0."),
    "comm_bytes_sent": ("bytes_sent", "Bytes that left rank 0 for other ranks."),
    "comm_seconds": ("seconds", "Time in collective calls of rank 0, waiting for others too."),
}


class CommCollector(Collector):
    """Reads what the engine told last, at scrape time."""

    def __init__(self, engine: EngineClient, prefix: str, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        totals = self._engine.communication
        if not totals:
            return
        for name, (field, text) in COUNTERS.items():
            family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=LABELS)
            for total in totals:
                value = getattr(total, field)
                if value is not None:
                    family.add_metric((*self._labels, total.group, total.operation), value)
            yield family
