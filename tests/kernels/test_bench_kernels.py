"""The benchmark runs, on the CPU without times; and its ruler reads what a clock says."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.bench import gpu_ruler
from moe_serve.bench.ruler import difference

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_every_group_runs_and_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    assert load("bench_kernels").main(["--smoke", "--tokens", "7", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    ops = {row["op"].split(":")[0] for row in found["rows"]}
    assert ops >= {"experts fp8", "linear fp32", "attention", "topk_router", "kv_store", "sampling"}
    assert {row["status"] for row in found["rows"]} == {"right"}
    assert {row["ours"] for row in found["rows"]} == {None}, "nothing is timed on a CPU"
    assert {one["rows_agree"] for one in found["exact"]} == {True}
    assert [one["what"] for one in found["end_to_end"]] == [
        "set-up", "decode", "capture", "decode", "prompt",
    ]  # fmt: skip
    assert "not timed" in capsys.readouterr().out


def test_nothing_is_measured_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in ("bench_kernels", "kernel_bench.model_check", "kernel_bench.device_check"):
        assert load(script).main([]) == 2
        assert "no CUDA device" in capsys.readouterr().out


def test_wrong_results_unwritten_memory_and_failures_are_told() -> None:
    case, run = load("kernel_bench.case"), load("kernel_bench.run")
    ones = torch.ones(4)

    def status(call: Callable[[], torch.Tensor]) -> str:
        problem = case.Problem(call, lambda found: difference(found, ones), 0, 0)
        one = case.Case("op", "shape", 4, lambda device, number: problem)
        return str(run.run_case(one, CPU, None, 0.0).status)

    assert status(lambda: ones * 1.001) == "right"
    assert status(lambda: ones * 1.1) == "wrong: more than 0.01"
    assert status(lambda: torch.empty(4)).startswith("wrong")
    assert status(lambda: ones.view(3)).startswith("failed: RuntimeError: shape")


class Event:
    """Stands for a device event: the device is the host here."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_the_ruler_tells_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    turns = []
    calls = [lambda: turns.append(0), lambda: (turns.append(1), time.sleep(0.002))]
    spread = gpu_ruler.time_calls(calls, is_captured=False, budget_us=20_000)
    # One call takes no time and one 2 ms.
    assert 1000 < spread.low <= spread.median <= spread.high
    assert spread.low < 3000
    assert turns[:4] == [0, 1, 0, 1]


def test_a_part_that_takes_too_long_is_ended_and_not_good(tmp_path: Path) -> None:
    check = load("kernel_bench.device_check")
    late = ["-c", "import time; time.sleep(60)"]
    parts = [
        check.Part(name="late", arguments=late, limit=0.3),
        check.Part(name="bad", arguments=["-c", "raise SystemExit(3)"], limit=9),
        check.Part(name="good", arguments=["-c", "print('well')"], limit=9),
    ]
    began = time.monotonic()
    assert check.check([parts], tmp_path) == 1
    assert time.monotonic() - began < 10
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert found["late"]["status"].startswith("ENDED")
    assert found["bad"]["status"] == "FAILED with 3"
    assert found["good"]["status"] == "passed"
    assert check.check([parts[2:]], tmp_path) == 0
