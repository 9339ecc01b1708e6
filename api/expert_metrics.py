"""Prometheus metrics of experts: few, since what is told by layer and expert is in the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.api.engine import EngineClient
from moe_serve.messages import ExpertStats

LABELS = ("model_name", "engine")


class ExpertCollector(Collector):
    """Reads what the engine told last, at scrape time. All layers together, see `ExpertStats`."""

    def __init__(self, engine: EngineClient, prefix: str, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        info, stats = self._engine.info, self._engine.experts
        if info is not None:
            is_up = float(self._engine.status == "ready")
            ranks = {str(rank): is_up for rank in range(info.num_ranks)}
            yield self._gauge("ep_rank_up", "1 while the rank serves.", ranks, "rank")
        if stats is not None:
            yield from self._of_stats(stats)

    def _of_stats(self, stats: ExpertStats) -> Iterable[Metric]:
        even = {"mean": stats.balancedness_mean, "min": stats.balancedness_min}
        shares = {str(k): share for k, share in stats.hot_shares.items()}
        rows = {str(rank): float(rows) for rank, rows in enumerate(stats.rows_of_ranks)}
        events = {outcome: float(count) for outcome, count in stats.rebalances.items()}
        yield self._gauge(
            "eplb_balancedness", "Mean over ranks / maximum, over layers.", even, "stat"
        )
        yield self._gauge("expert_entropy", "1: all experts get as much.", {"": stats.entropy})
        yield self._gauge(
            "expert_hot_share", "Share of choices of the k hottest experts.", shares, "k"
        )
        yield self._counter(
            "eplb_tokens_per_rank", "Rows that a rank's experts computed.", rows, "rank"
        )
        yield self._counter(
            "eplb_rebalance_events", "Rebalances that ended, by outcome.", events, "outcome"
        )
        is_moving = {"": float(stats.is_rebalancing)}
        yield self._gauge("eplb_rebalancing", "1 while experts move.", is_moving)
        seconds = {"": stats.rebalance_seconds}
        yield self._gauge("eplb_rebalance_seconds", "What the last rebalance took.", seconds)

    def _gauge(
        self, name: str, text: str, values: Mapping[str, float], label: str | None = None
    ) -> Metric:
        labels = LABELS if label is None else (*LABELS, label)
        return self._filled(GaugeMetricFamily(self._name(name), text, labels=labels), values)

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str) -> Metric:
        family = CounterMetricFamily(self._name(name), text, labels=(*LABELS, label))
        return self._filled(family, values)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
    ) -> Metric:
        for value_of, value in values.items():
            family.add_metric((*self._labels, *([value_of] if value_of else [])), value)
        return family

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"
