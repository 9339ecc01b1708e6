"""Prometheus metrics under vLLM's suffixes, so that boards made for it work unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.api.comm_metrics import CommCollector
from moe_serve.api.engine import EngineClient
from moe_serve.api.expert_metrics import ExpertCollector
from moe_serve.messages import EngineStats, RequestUpdate

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_BUCKETS = (1, *(2**power for power in range(3, 15)))
LABELS = ("model_name", "engine")
ENGINE_LABEL = "0"


class ApiMetrics:
    """All metrics of the server, in a registry of their own.

    Latencies are in seconds, as the API process sees them; lengths in tokens.
    """

    def __init__(self, *, prefix: str, model_name: str, engine: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._labels = (model_name, ENGINE_LABEL)
        histogram = self._histogram
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens.", TOKEN_LATENCY_BUCKETS
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "Arrival to first step.", REQUEST_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS
        )
        self.prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence.", LENGTH_BUCKETS
        )
        self.generation_length = histogram(
            "request_generation_tokens", "Output tokens of a sequence.", LENGTH_BUCKETS
        )
        self.step_tokens = histogram(
            "iteration_tokens_total", "Tokens of an engine step.", STEP_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            f"{prefix}:request_success",
            "Sequences that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(engine, prefix, self._labels))
        self.registry.register(ExpertCollector(engine, prefix, self._labels))
        self.registry.register(CommCollector(engine, prefix, self._labels))

    def observe_step(self, stats: EngineStats) -> None:
        """To be called with the stats of every engine step."""
        if stats.num_scheduled_tokens:
            self.step_tokens.observe(stats.num_scheduled_tokens)

    def count_finished(self, reason: str) -> None:
        self._success.labels(*self._labels, reason).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"{self._prefix}:{name}", text, LABELS, buckets=buckets, registry=self.registry
        ).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, LABELS, registry=self.registry).labels(
            *self._labels
        )


class _EngineCollector(Collector):
    """Reads what the engine counts itself, at scrape time."""

    GAUGES = {
        "num_requests_running": ("num_running", "Sequences in the batch."),
        "num_requests_waiting": ("num_waiting", "Sequences that wait for blocks or a slot."),
        "kv_cache_usage_perc": ("kv_cache_usage", "Share of KV blocks in use; 1 is all."),
    }
    COUNTERS = {
        "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the cache."),
        "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the cache."),
        "num_preemptions": ("num_preemptions", "Sequences that lost their blocks."),
        "num_recomputed_tokens": ("num_recomputed_tokens", "Tokens computed again after that."),
    }

    def __init__(self, engine: EngineClient, prefix: str, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        families = ((GaugeMetricFamily, self.GAUGES), (CounterMetricFamily, self.COUNTERS))
        for family_type, table in families:
            for name, (field, text) in table.items():
                family = family_type(f"{self._prefix}:{name}", text, labels=LABELS)
                family.add_metric(self._labels, getattr(stats, field))
                yield family


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class SequenceTimer:
    """Measures one sequence. `now` is `time.time()`, the clock of the engine's own times."""

    metrics: ApiMetrics
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    last_token_time: float = 0.0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0

    def observe(self, update: RequestUpdate, now: float) -> None:
        self.scheduled_time = update.scheduled_time or self.scheduled_time
        self.first_token_time = update.first_token_time or self.first_token_time
        if not update.token_ids:
            return
        if self.num_output_tokens == 0:
            self.metrics.prompt_tokens.inc(self.num_prompt_tokens)
            self.metrics.time_to_first_token.observe(now - self.arrival_time)
        else:
            self.metrics.inter_token_latency.observe(now - self.last_token_time)
        self.num_output_tokens += len(update.token_ids)
        self.metrics.generation_tokens.inc(len(update.token_ids))
        self.last_token_time = now

    def finish(self, reason: str, now: float) -> None:
        """Count the end. Only sequences that ran to their end tell about latency and length."""
        metrics = self.metrics
        metrics.count_finished(reason)
        if reason not in ("stop", "length"):
            return
        metrics.e2e_latency.observe(now - self.arrival_time)
        metrics.prompt_length.observe(self.num_prompt_tokens)
        metrics.generation_length.observe(self.num_output_tokens)
        if self.scheduled_time:
            metrics.queue_time.observe(max(0.0, self.scheduled_time - self.arrival_time))
        if self.scheduled_time and self.first_token_time:
            metrics.prefill_time.observe(self.first_token_time - self.scheduled_time)
            metrics.decode_time.observe(max(0.0, now - self.first_token_time))
