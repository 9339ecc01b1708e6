"""`moe-serve plan` on a tiny trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.cli import main
from moe_serve.experts.files.placement_files import read_placement, write_placement
from moe_serve.experts.files.route_files import write_routes
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import RouteRecording

CONFIG = {"model_type": "tiny", "hidden_size": 64, "moe_intermediate_size": 16, "num_experts": 8,
          "num_experts_per_tok": 2, "num_hidden_layers": 3, "torch_dtype": "bfloat16"}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """97 tokens that like low experts."""
    rng = np.random.default_rng(0)
    scores = rng.random((97, 3, 8)) - np.arange(8) / 8
    ids_TLK = np.argsort(-scores, axis=-1)[..., :2].astype(np.int16)
    routes = RouteRecording(
        model="tiny", num_experts=8, ids_TLK=ids_TLK, request_lengths=(50, 47),
        phases_T=np.zeros(97, dtype=np.int8),
    )  # fmt: skip
    write_routes(routes, tmp_path / "trace.npz")
    return str(tmp_path / "trace.npz")


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 0
    return capsys.readouterr().out


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(plan(capsys, *args, "--json"))
    return values


def test_each_pair_has_a_line_and_a_trace_alone_gives_what_is_exact(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    text = plan(capsys, "--trace", trace, "--ep", "2,4", "--redundant", "0,4")
    labels = [line.split()[:3] for line in text.splitlines() if line.strip()[:1].isdigit()]
    pairs = [["2", "0"], ["2", "4"], ["4", "0"], ["4", "4"]]
    expected = [[*pair, name] for pair in pairs for name in ("linear", "balanced")]
    assert labels == expected * 2
    assert "97 tokens of 2 requests, 3 MoE layers, 8 experts, 2 per token" in text
    assert "--config" in text and "tokens/s" not in text
    assert "\nMost even in its steps: EP 2, " in text


def test_with_a_config_there_are_bytes_memory_and_times(
    capsys: pytest.CaptureFixture[str], trace: str, config: str
) -> None:
    args = ("--trace", trace, "--config", config, "--ep", "2", "--redundant", "2")
    text = plan(capsys, *args, "--hardware", "h200")
    assert "4.8e+12 B/s of memory" in text and "tokens/s" in text and "KiB/token" in text
    values = planned(capsys, *args, "--batch-tokens", "10")
    linear = values["layouts"][0]
    # 10 slots in 3 layers; 3 matrices of 64 x 16, in 2 bytes.
    assert sum(linear["expert_bytes_of_ranks"]) == 10 * 3 * 3 * 64 * 16 * 2
    assert values["replica_expert_bytes"] == 8 * 3 * 3 * 64 * 16 * 2
    assert sum(linear["rows_of_ranks"]) == 97 * 2 * 3
    # Nine steps with 5 tokens on each rank and one with 4; 132 bytes and 4 more a token, 2 results.
    static = linear["bytes_sent"]["allgather_reducescatter"]
    assert static["by_rank"] == [3 * (9 * 5 + 4) * (136 + 2 * 128)] * 2
    assert static["total"] == 2 * static["busiest_rank"]
    assert linear["estimated"]["tokens_per_second"] > 0


def test_every_number_of_the_hardware_counts(
    capsys: pytest.CaptureFixture[str], trace: str, config: str
) -> None:
    args = ("--trace", trace, "--config", config, "--ep", "2")
    speeds = [
        planned(capsys, *args, *more)["layouts"][0]["estimated"]["tokens_per_second"]
        for more in (
            (), ("--flops", "1e9"), ("--memory-bandwidth", "1e6"), ("--link-bandwidth", "1e6"),
            ("--message-seconds", "0.5"), ("--hardware", "cpu"), ("--dtype", "float32"),
        )
    ]  # fmt: skip
    assert len(set(speeds)) == len(speeds) and max(speeds) == speeds[0]


def test_the_best_placement_is_written_and_can_be_replayed(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "best.json")
    args = ("--trace", trace, "--ep", "4", "--redundant", "0,4")
    values = planned(capsys, *args, "--output", file)
    best = values["layouts"][values["best"]]
    assert best["placement"] == "balanced"
    replayed = planned(capsys, *args, "--placement", file)["layouts"][-1]
    assert replayed == best | {"placement": "file"}
    assert read_placement(file, 4).num_slots == 8 + best["redundant"]


@pytest.mark.parametrize(("style", "suffix"), [("sglang", "json"), ("tensorrt_llm", "yaml")])
def test_the_best_placement_is_written_for_another_engine(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, style: str, suffix: str
) -> None:
    ours, theirs = tmp_path / "best.json", tmp_path / f"theirs.{suffix}"
    args = ("--trace", trace, "--ep", "4", "--redundant", "4")
    planned(capsys, *args, "--output", str(ours))
    planned(capsys, *args, "--output", str(theirs), "--style", style)
    assert read_placement(theirs, 4) == read_placement(ours, 4)
    assert "moe_serve" not in theirs.read_text()


def test_the_plan_is_shown_even_where_its_placement_cannot_be_written(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    assert main(["plan", "--trace", trace, "--ep", "2", "--output", "best.csv"]) == 2
    out, error = capsys.readouterr()
    assert "Most even in its steps: EP 2" in out and "best.csv" in error


def test_a_config_that_knows_more_experts_than_were_chosen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str
) -> None:
    """Published routes do not tell how many there are."""
    ids = np.tile(np.array([[[0, 1]] * 3], dtype=np.uint8), (5, 1, 1))
    np.savez(tmp_path / "t.npz", law_ids=ids, law_request_lengths=np.array([5]))
    args = ("--trace", str(tmp_path / "t.npz"), "--ep", "2")
    assert planned(capsys, *args)["num_experts"] == 2
    assert planned(capsys, *args, "--config", config)["num_experts"] == 8


def test_balanced_placements_can_be_made_for_another_load(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    """One that is the other way round: what it makes does not suit the trace."""
    counts = [list(range(1, 9))] * 3
    (tmp_path / "load.json").write_text(json.dumps({"counts": {"all": counts}}))
    args = ("--trace", trace, "--ep", "4", "--redundant", "4")
    own = planned(capsys, *args)
    other = planned(capsys, *args, "--balance-by", str(tmp_path / "load.json"))
    assert own["balanced_for"] == "the trace itself"
    assert other["balanced_for"] == str(tmp_path / "load.json")
    assert own["layouts"][0] == other["layouts"][0]
    least, most = (one["layouts"][1]["balancedness"]["mean"] for one in (other, own))
    assert least < most
    assert planned(capsys, *args, "--balance-by", trace)["layouts"] == own["layouts"]


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-serve: error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ep", "2,x"), "--ep 'x' must be a whole number from 1 on"),
        (("--ep", "0"), "--ep '0' must be a whole number from 1 on"),
        (("--redundant", "-1"), "--redundant '-1' must be a whole number from 0 on"),
        (("--ep", "9"), "--ep 9: 8 experts cannot fill as many ranks"),
        (("--ep", "2", "--redundant", "9"), "leave room for 8"),
        (("--batch-tokens", "0"), "--batch-tokens '0' must be a whole number from 1 on"),
        (("--redundnt", "3"), "did you mean --redundant?"),
        (("--hardware", "h200"), "--hardware has no effect without --config"),
        (("--flops", "1"), "--flops has no effect without --config"),
        (("--output", "x.json"), "--output is for one number of ranks"),
        (("--style", "eplb"), "--style has no effect without --output"),
        (("--ep", "2", "--output", "x.json", "--style", "sgl"), "--style sgl must be moe_serve,"),
        (("--config", "nowhere"), "--config nowhere: No such file"),
        (("--config", "CONFIG", "--hardware", "h300"), "--hardware 'h300' is not one of"),
        (("--config", "CONFIG", "--flops", "fast"), "--flops 'fast' must be a number above 0"),
        (("--config", "CONFIG", "--dtype", "fp8"), "--dtype 'fp8' is not one of float32"),
        (("--config", "MORE"), "--config is of a model with 9 experts, the trace has 8"),
        (("--config", "FEWER"), "model with 7 experts, the trace has 8"),
        (("--balance-by", "LOAD"), "2 layers of 8 experts, but the trace has 3 of 8"),
        (("--config", "BROKEN"), "not readable JSON"),
        (("--ep", "4", "--placement", "PLACEMENT"), "is for 2 ranks, not 4"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], trace: str, config: str, tmp_path: Path,
    args: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    (tmp_path / "more.json").write_text(json.dumps(CONFIG | {"num_experts": 9}))
    (tmp_path / "fewer.json").write_text(json.dumps(CONFIG | {"num_experts": 7}))
    (tmp_path / "load.json").write_text(json.dumps({"counts": {"all": [[2] * 8] * 2}}))
    (tmp_path / "broken.json").write_text("{")
    write_placement(Placement.make(3, 8, 2), tmp_path / "placement.json")
    files = {
        "CONFIG": config,
        "MORE": str(tmp_path / "more.json"),
        "FEWER": str(tmp_path / "fewer.json"),
        "LOAD": str(tmp_path / "load.json"),
        "BROKEN": str(tmp_path / "broken.json"),
        "PLACEMENT": str(tmp_path / "placement.json"),
    }
    words = [files.get(arg, arg) for arg in args]
    assert message in refusal(capsys, "--trace", trace, *words)


def test_a_trace_is_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--trace" in refusal(capsys, "--ep", "2")
    assert "nowhere.npz" in refusal(capsys, "--trace", str(tmp_path / "nowhere.npz"))
