"""/metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_serve.messages import CommTotal, ExpertStats

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


def expert_samples(server: Any) -> dict[str, float]:
    """'name{label=value}' -> value, of the samples that are about experts and ranks."""
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            name = sample.name.partition(":")[2]
            if name.startswith(("ep_", "eplb_", "expert_")):
                inner = ",".join(f"{label}={value}" for label, value in labels.items())
                found[f"{name}{{{inner}}}" if inner else name] = sample.value
    return found


STATS = ExpertStats(
    balancedness_mean=0.75,
    balancedness_min=0.5,
    entropy=0.875,
    hot_shares={1: 0.25, 4: 0.75, 8: 1.0},
    rows_of_ranks=[17, 2**40],
    is_rebalancing=True,
    rebalances={"done": 3, "failed": 1},
    rebalance_seconds=1.5,
)


@pytest.mark.parametrize("prefix", ["moe_serve", "vllm"])
def test_experts_have_few_metrics_under_known_names(serve: Any, prefix: str) -> None:
    server = serve(metrics_prefix=prefix)
    # Before the first collection of counts there is nothing to tell of.
    assert expert_samples(server) == {"ep_rank_up{rank=0}": 1}
    server.engine.info = dataclasses.replace(
        server.engine.info, tensor_parallel_size=2, expert_parallel_size=2
    )
    server.engine.experts = STATS
    assert expert_samples(server) == {
        "ep_rank_up{rank=0}": 1,
        "ep_rank_up{rank=1}": 1,
        "eplb_balancedness{stat=mean}": 0.75,
        "eplb_balancedness{stat=min}": 0.5,
        "expert_entropy": 0.875,
        "expert_hot_share{k=1}": 0.25,
        "expert_hot_share{k=4}": 0.75,
        "expert_hot_share{k=8}": 1,
        "eplb_tokens_per_rank_total{rank=0}": 17,
        "eplb_tokens_per_rank_total{rank=1}": 2**40,
        "eplb_rebalancing": 1,
        "eplb_rebalance_events_total{outcome=done}": 3,
        "eplb_rebalance_events_total{outcome=failed}": 1,
        "eplb_rebalance_seconds": 1.5,
    }
    text = server.http.get("/metrics").text
    assert f"# TYPE {prefix}:eplb_tokens_per_rank_total counter" in text
    assert f"# TYPE {prefix}:eplb_balancedness gauge" in text


def test_communication_is_counted_by_group_and_operation(serve: Any) -> None:
    server = serve()
    assert ":comm_" not in server.http.get("/metrics").text
    server.engine.communication = [
        CommTotal(group="lane", operation="gather", calls=3, bytes_sent=2**40, seconds=1.5),
        CommTotal(group="experts", operation="gather", calls=2, bytes_sent=7, seconds=None),
    ]
    samples = [
        (sample.name, sample.labels["group"], sample.labels["operation"], sample.value)
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if ":comm_" in sample.name
    ]
    assert samples == [
        ("moe_serve:comm_calls_total", "lane", "gather", 3),
        ("moe_serve:comm_calls_total", "experts", "gather", 2),
        ("moe_serve:comm_bytes_sent_total", "lane", "gather", 2**40),
        ("moe_serve:comm_bytes_sent_total", "experts", "gather", 7),
        ("moe_serve:comm_seconds_total", "lane", "gather", 1.5),
    ]


def test_ranks_are_down_when_the_engine_is(serve: Any) -> None:
    server = serve()
    server.engine.status, server.engine.failure = "dead", "killed"
    assert expert_samples(server)["ep_rank_up{rank=0}"] == 0
    server.engine.status, server.engine.info = "starting", None
    assert expert_samples(server) == {}
