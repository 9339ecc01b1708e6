"""`LLM` with ranks of its own: made and closed again, and what goes wrong in between."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.errors import ConfigError, EngineDeadError
from moe_serve.rank_processes import RankProcesses

pytestmark = pytest.mark.dist

TIMEOUT = 4.0
OPTIONS = {"num_threads": 1, "num_kv_blocks": 64, "dtype": "float32", "collective_timeout": TIMEOUT}
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine would set for its process, and what a torchrun around us would."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


@pytest.fixture
def left() -> Iterator[None]:
    """Fails where a process, a thread or a socket stays behind."""
    before = holdings()
    yield
    deadline = time.monotonic() + 3
    # ZMQ closes in a thread of its own.
    while (after := holdings()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert after <= before


def holdings() -> tuple[int, int, int]:
    num_connections = len(psutil.Process().net_connections())
    return len(other_ranks()), threading.active_count(), num_connections


def other_ranks() -> list[psutil.Process]:
    """Not every child of a test process is one, and the newest need not have the highest number."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in str(child.cmdline()):
                found.append(child)
    return found


def text_of(llm: LLM) -> str:
    return llm.generate(["Once upon"], GREEDY)[0].outputs[0].text


@pytest.mark.usefixtures("left")
def test_one_after_the_other_and_a_rank_that_dies_in_between(random_model: Path) -> None:
    with LLM(str(random_model), tensor_parallel_size=2, **OPTIONS) as llm:
        text = text_of(llm)
        with pytest.raises(ConfigError, match="this process has a torch.distributed group"):
            LLM(str(random_model), data_parallel_size=2, **OPTIONS)
        assert text_of(llm) == text
    before = other_ranks()
    with LLM(str(random_model), data_parallel_size=2, **OPTIONS) as llm:
        assert text_of(llm) == text
        (rank,) = [rank for rank in other_ranks() if rank not in before]
        threading.Timer(0.3, rank.kill).start()
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {rank.pid} on .*\) ended"):
            while time.monotonic() < began + 2 * TIMEOUT:
                llm.generate(["abc", "b", "x" * 40], ENDLESS)
        assert time.monotonic() - began < TIMEOUT
        with pytest.raises(EngineDeadError, match="cut short"):
            text_of(llm)


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3"),
        ({"tensor_parallel_size": 2, "max_model_len": 9999}, "--max-model-len 9999"),
        ({"tensor_parallel_size": 2, "typo": 1}, "typo"),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_are_started(
    random_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, int],
    words: str,
) -> None:
    monkeypatch.delattr(RankProcesses, "_start")
    with pytest.raises(ConfigError, match=words):
        LLM(str(random_model), **(OPTIONS | options))


@pytest.mark.usefixtures("left")
def test_a_rank_that_dies_before_it_has_come_is_missed_at_once(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RankProcesses._start

    def start_and_kill(self: RankProcesses, *args: object) -> object:
        process = start(self, *args)  # type: ignore[arg-type]
        process.kill()
        return process

    monkeypatch.setattr(RankProcesses, "_start", start_and_kill)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* ended at its start with exit code -9"):
        LLM(str(random_model), tensor_parallel_size=2, **OPTIONS)
    assert time.monotonic() - began < TIMEOUT


SCRIPT = """
import os, signal, sys, threading
from moe_serve import LLM, SamplingParams
from moe_serve.errors import EngineDeadError

if __name__ == "__main__":
    # Where tests run in the background, it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_threads=1, num_kv_blocks=64)
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    # As a terminal does it: Ctrl-C goes to every process of the group.
    threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
    try:
        while True:
            llm.generate(["abc"] * 8, params)
    except KeyboardInterrupt:
        print("interrupted")
    try:
        llm.generate(["abc"], params)
    except EngineDeadError as error:
        print(error)
    # It forgets to close.
"""


def group_of(number: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == number:
                found.append(process)
    return found


def test_a_script_that_does_not_close_ends_all_the_same(random_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), str(random_model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=60)
            # multiprocessing's tracker ends a moment later.
            psutil.wait_procs(group_of(process.pid), timeout=5)
            left = group_of(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0 and not left, output
    assert "interrupted" in output and "cut short" in output and "Traceback" not in output
