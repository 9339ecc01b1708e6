"""/metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

HISTOGRAMS = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
]  # fmt: skip


def samples_of(server: Any) -> dict[str, float]:
    """Name -> value of every sample; label sets but `finished_reason` are checked and dropped."""
    found = {}
    text = server.http.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"
            extra = sample.labels.get("finished_reason") or sample.labels.get("le", "")
            found[sample.name + (f"/{extra}" if extra else "")] = sample.value
    return found


@pytest.mark.parametrize("prefix", ["moe_serve", "vllm"])
def test_two_sequences_are_counted_under_the_prefix(serve: Any, prefix: str) -> None:
    server = serve(metrics_prefix=prefix)
    server.complete(prompt="abcde", n=2, max_tokens=4)
    found = samples_of(server)
    value = {name.removeprefix(f"{prefix}:"): found[name] for name in found}
    assert all(name.startswith(f"{prefix}:") for name in found)
    assert value["prompt_tokens_total"] == 10
    assert value["generation_tokens_total"] == 8
    assert value["request_success_total/length"] == 2
    counts = {name: value[f"{name}_count"] for name in HISTOGRAMS}
    assert counts == dict.fromkeys(HISTOGRAMS, 2) | {
        "inter_token_latency_seconds": 6,
        "iteration_tokens_total": 8,
    }
    assert value["request_prompt_tokens_sum"] == 10
    assert value["request_queue_time_seconds_sum"] == pytest.approx(0.002, rel=1e-3)
    assert value["request_prefill_time_seconds_sum"] == pytest.approx(0.002, rel=1e-3)
    gauges = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
    assert gauges <= value.keys() and value["kv_cache_usage_perc"] == 0.25
    assert value["prefix_cache_queries_total"] == 40
    assert value["prefix_cache_hits_total"] == 30
    assert value["num_preemptions_total"] == 2


def test_every_end_is_counted_by_its_reason(serve: Any) -> None:
    server = serve()
    server.complete(prompt="a", max_tokens=64)
    server.complete(prompt="a", stop="ce")
    server.complete(prompt="a", max_tokens=2)
    server.engine.fail_at = 2
    server.complete(prompt="a")
    found = samples_of(server)
    reasons = {n.split("/")[1]: v for n, v in found.items() if "request_success_total/" in n}
    assert reasons == {"stop": 2, "length": 1, "abort": 1}
    assert found["moe_serve:e2e_request_latency_seconds_count"] == 3
