from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moe_serve.bench.serving.curves import latency_curves, shares
from moe_serve.bench.serving.figures import figures, medians, peak_concurrency, ratios
from moe_serve.bench.serving.goodput import Objectives, parse_objectives
from moe_serve.bench.serving.outcome import Outcome
from moe_serve.bench.serving.report import Measured, document
from moe_serve.bench.serving.runner import Observed
from moe_serve.bench.serving.targets import Target, parse_urls
from moe_serve.bench.serving.terminal import notes, print_report
from moe_serve.errors import ConfigError


def good(ttft: float = 0.1, gaps: tuple[float, ...] = (0.02,), **fields: Any) -> Outcome:
    values: dict[str, Any] = {
        "due": 0.0, "sent": 0.0, "ended": 1.0, "num_input": 7, "num_output": 1 + len(gaps),
        "num_chunks": 1 + len(gaps), "ttft": ttft, "e2el": ttft + sum(gaps),
        "tpot": sum(gaps) / len(gaps) if gaps else None, "itl": gaps,
    }  # fmt: skip
    return Outcome(**(values | fields))


def bad(error: str = "429: full", **fields: Any) -> Outcome:
    return Outcome(**({"due": 0.0, "sent": 0.0, "ended": 1.0, "error": error} | fields))


def run(*outcomes: Outcome, duration: float = 2.0) -> dict[str, Any]:
    observed = Observed(outcomes=list(outcomes), duration=duration, client_cpu_seconds=0.5)
    return figures(observed)


def test_known_figures() -> None:
    values = run(
        good(0.1, (0.02, 0.04), num_wanted=4),
        good(0.3, (0.01,), num_wanted=2),
        bad(),
        bad(),
        bad("closed"),
    )
    expected = {
        "duration": 2.0, "completed": 2, "failed": 3, "short": 1,
        "errors": {"429: full": 2, "closed": 1},
        "total_input_tokens": 14, "total_output_tokens": 5, "tokens_per_chunk": 1.0,
        "request_throughput": 1.0, "request_goodput": None, "output_throughput": 2.5,
        "total_token_throughput": 9.5, "client_cpu_share": 0.25, "p99_delay_ms": None,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert values["mean_ttft_ms"] == pytest.approx(200)
    assert values["p50_ttft_ms"] == pytest.approx(200)
    assert values["p99_ttft_ms"] == pytest.approx(298)
    assert values["p50_itl_ms"] == pytest.approx(20)  # gaps of all requests: 10, 20, 40
    assert values["mean_itl_ms"] == pytest.approx(70 / 3)
    assert values["mean_tpot_ms"] == pytest.approx(20)  # of requests: 30 and 10
    assert values["p90_e2el_ms"] == pytest.approx(160 + 0.9 * 150)


def test_nothing_at_all_and_nothing_good() -> None:
    for values in (run(), run(bad()), run(good(gaps=()))):
        assert values["p50_itl_ms"] is None and values["mean_tpot_ms"] is None
        json.dumps(values, allow_nan=False)
    assert run(duration=0.0)["output_throughput"] == 0
    assert run(bad())["tokens_per_chunk"] is None


def test_requests_that_are_late_are_told() -> None:
    values = run(good(due=1.0, sent=1.25), good(due=0.0, sent=0.75))
    assert values["mean_delay_ms"] == pytest.approx(500)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=30))
def test_peak_concurrency_is_that_of_the_fullest_moment(spans: list[tuple[int, int]]) -> None:
    outcomes = [bad(sent=float(start), ended=float(start + length)) for start, length in spans]
    busy = np.zeros(50, dtype=int)
    for start, length in spans:
        busy[start : start + length] += 1
    assert peak_concurrency(outcomes) == busy.max()


def test_goodput_counts_requests_within_all_limits() -> None:
    objectives = parse_objectives(["ttft:150", "tpot:25", "e2el:1e3"])
    assert objectives == Objectives(ttft=0.15, tpot=0.025, e2el=1.0)
    outcomes = [
        good(0.15, (0.025,)), good(0.2), good(0.1, (0.03,)), good(0.1, (0.02,) * 60), bad(),
        good(0.1, ()),
    ]  # fmt: skip
    assert [objectives.is_met(each) for each in outcomes] == [True, *[False] * 4, True]
    observed = Observed(outcomes=outcomes, duration=4.0, client_cpu_seconds=0.0)
    assert figures(observed, objectives)["request_goodput"] == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ttfb:5"], "'ttfb' must be ttft or tpot or e2el; did you mean ttft?"),
        (["ttft"], "'' must be milliseconds, as ttft:500"),
        (["tpot:x"], "'x' must be milliseconds"),
        (["tpot:0"], "'0' must be milliseconds"),
        (["tpot:nan"], "'nan' must be milliseconds"),
        (["tpot:inf"], "'inf' must be milliseconds"),
        (["tpot:1", "tpot:2"], "gives tpot twice"),
    ],
)
def test_a_bad_objective_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_objectives(words)
    assert message in str(error.value)
    assert parse_objectives(None) is None


def test_medians_and_ratios_pair_runs() -> None:
    slow = [run(good(ttft), bad()) for ttft in (0.1, 0.4, 0.2)]
    fast = [run(good(ttft)) for ttft in (0.05, 0.1, 0.2)]
    middle = medians(slow)
    assert middle["p50_ttft_ms"] == pytest.approx(200)
    assert middle["errors"] == {"429: full": 3}
    assert middle["completed"] == 1 and isinstance(middle["completed"], int)
    assert list(middle) == list(slow[0])
    # 0.5, 0.25, 1: of each run, not of the medians.
    assert ratios(fast, slow)["p50_ttft_ms"] == pytest.approx(0.5)
    assert ratios(slow, fast)["failed"] is None


def target(name: str) -> Target:
    return Target(name=name, url=f"http://{name}", model="m", facts={"model": None})


def report(num_servers: int, num_runs: int, **settings: Any) -> dict[str, Any]:
    measured = [
        Measured(target=target(name), runs=[run(good(0.1 * (1 + n)), bad())] * num_runs)
        for n, name in enumerate(["ours", "other", "third"][:num_servers])
    ]
    return document(measured, settings, 2, 0)


def printed(values: dict[str, Any], encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_report(values, Console(file=file, width=150))
    file.seek(0)
    return file.read()


def test_the_document_holds_all_runs_and_no_key() -> None:
    values = report(3, 2, api_key="secret", seed=5)
    assert "secret" not in json.dumps(values, allow_nan=False)
    assert values["settings"] == {"seed": 5}
    assert [len(each["runs"]) for each in values["targets"]] == [2, 2, 2]
    pairs = [(each["of"], each["to"]) for each in values["ratios"]]
    assert pairs == [("other", "ours"), ("third", "ours"), ("third", "other")]
    assert values["ratios"][0]["median"]["p50_ttft_ms"] == pytest.approx(2)
    assert values["client"]["num_cpus"] >= 1


def test_one_server_is_one_column() -> None:
    text = printed(report(1, 1))
    assert "ours: m at http://ours" in text and "one run" in text
    assert "Runs" not in text and " / " not in text and "goodput" not in text
    line = next(line.split() for line in text.splitlines() if "TTFT" in line)
    assert line == ["TTFT", *["100.00"] * 5]
    assert "ours: 1 x 429: full" in text


def test_several_servers_stand_beside_each_other() -> None:
    text = printed(report(2, 3), "ascii")
    assert text.isascii() and "other / ours" in text and "Runs" in text
    line = next(line for line in text.splitlines() if "output tokens per second" in line)
    assert line.replace("|", " ").split()[-3:] == ["1.00", "1.00", "1.00x"]


def test_a_busy_client_and_lost_rows_are_told() -> None:
    values = report(1, 1)
    values["targets"][0]["median"]["client_cpu_share"] = 0.7
    values["load"]["num_left_out"] = 4
    lines = notes(values)
    values["targets"][0]["median"]["short"] = 3
    assert "ours: 3 answers had fewer tokens than were asked for." in notes(values)
    assert lines[0].endswith("--trace-max-len: 4") and "busy 70% of the time" in lines[2]


def test_curves_are_shares_of_requests() -> None:
    assert shares([3.0, 1.0]) == [(1000.0, 50.0), (3000.0, 100.0)]
    assert shares([]) == []
    many = shares([float(n) for n in range(1, 1001)])
    assert (len(many), many[0], many[-1]) == (200, (1000.0, 0.1), (1e6, 100.0))
    text = latency_curves({"ours": [good(), bad()], "none": [bad()]})
    assert text.count(">ours</text>") == 2
    ET.fromstring(text)


@pytest.mark.parametrize(
    ("base_url", "compare", "message"),
    [
        ("localhost:8000", None, "--base-url localhost:8000 must begin with http"),
        ("http://", None, "--base-url http:// must begin with"),
        ("http://a:99999", None, "--base-url http://a:99999: Port out of range"),
        ("", ["a=http://a"], "--compare needs two"),
        ("", ["a=http://a", "http://b"], "--compare http://b must be NAME=URL"),
        ("", ["a=http://a", "a=http://b"], "--compare gives a name twice: a, a"),
        ("", ["a=http://a", "b=b:80"], "--compare b:80 must begin with"),
    ],
)
def test_a_bad_address_is_named(base_url: str, compare: list[str] | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_urls(base_url, compare)
    assert message in str(error.value)


def test_addresses_lose_the_version() -> None:
    assert parse_urls("http://a:1/v1/", None) == [("server", "http://a:1")]
    assert parse_urls("", ["x=http://a", "y=https://b/c"]) == [
        ("x", "http://a"), ("y", "https://b/c"),
    ]  # fmt: skip
