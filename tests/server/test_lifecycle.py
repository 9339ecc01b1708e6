"""Start, readiness, orderly end and sudden death of the whole server."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.dist

# What the `start` fixture is: conftest's Server has no importable name.
Start = Callable[..., Any]
LONG = {"max_tokens": None, "ignore_eos": True}


class Stream(threading.Thread):
    """Reads a streamed completion to its end; `started` is set by the first chunk."""

    def __init__(self, url: str, **fields: object) -> None:
        super().__init__(daemon=True)
        self.url, self.fields = url, fields
        self.started = threading.Event()
        self.events: list[dict[str, Any]] = []
        self.was_done = False
        self.start()

    def run(self) -> None:
        body = {"prompt": "abc", "temperature": 0, "stream": True} | self.fields
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.was_done = True
                elif line:
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self.started.set()

    @property
    def text(self) -> str:
        return "".join(e["choices"][0]["text"] for e in self.events if e.get("choices"))

    @property
    def error(self) -> dict[str, str] | None:
        return next((e["error"] for e in self.events if "error" in e), None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_what_runs_and_ends_with_0(
    start: Start, random_model: Path, number: signal.Signals
) -> None:
    server = start(random_model).wait_ready()
    undisturbed = server.complete("abc", **LONG).json()["choices"][0]["text"]
    stream = Stream(server.url, **LONG)
    assert stream.started.wait(20)
    children = server.children()
    server.process.send_signal(number)
    refused = None
    while server.process.poll() is None and refused is None:
        try:
            answer = server.complete("x", max_tokens=1)
            refused = answer.status_code if answer.status_code != 200 else None
        except httpx.TransportError:
            refused = 0
    assert refused in (0, 503)
    assert server.process.wait(20) == 0
    stream.join(10)
    assert stream.text == undisturbed and stream.was_done and stream.error is None
    assert not psutil.wait_procs(children, timeout=5)[1], "left behind"


@pytest.mark.parametrize("second_signal", [False, True])
def test_past_the_grace_time_a_stream_ends_with_an_error(
    start: Start, random_model: Path, second_signal: bool
) -> None:
    grace = "60" if second_signal else "0.3"
    # So slow that no stream can end by itself.
    slow = ("--max-num-batched-tokens", "1", "--cpu-kernels", "none")
    server = start(random_model, "--shutdown-timeout", grace, *slow)
    server.wait_ready()
    prompt = [7] * 200
    streams = [Stream(server.url, prompt=prompt, max_tokens=50) for _ in range(40)]
    while server.client.get("/load").json()["server_load"] < 40:
        time.sleep(0.05)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    if second_signal:
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began < 10
    for stream in streams:
        stream.join(10)
        assert stream.error is not None and "shut" in stream.error["message"]


@pytest.mark.parametrize("is_stopped_first", [False, True])
def test_death_of_the_engine_ends_everything_within_5_seconds(
    start: Start, random_model: Path, is_stopped_first: bool
) -> None:
    server = start(random_model).wait_ready()
    stream = Stream(server.url, **LONG)
    assert stream.started.wait(20)
    engine = server.engine()
    if is_stopped_first:
        engine.suspend()
    began = time.monotonic()
    engine.kill()
    seen = set()
    while server.process.poll() is None and time.monotonic() - began < 10:
        try:
            seen.add(server.client.get("/health").status_code)
        except httpx.TransportError:
            break
        time.sleep(0.02)
    assert server.process.wait(5) == 1
    assert time.monotonic() - began < 5
    stream.join(5)
    assert stream.error is not None and "engine" in stream.error["message"]
    assert 503 in seen
    again = start(random_model, port=server.port).wait_ready()
    assert again.complete().status_code == 200


def test_an_engine_that_hangs_ends_everything_after_the_step_timeout(
    start: Start, random_model: Path
) -> None:
    server = start(random_model, "--step-timeout", "1.5").wait_ready()
    stream = Stream(server.url, **LONG)
    assert stream.started.wait(20)
    server.engine().suspend()
    began = time.monotonic()
    assert server.process.wait(10) == 1
    assert time.monotonic() - began < 8
    stream.join(5)
    assert stream.error is not None and "--step-timeout 1.5" in stream.error["message"]


def test_idle_time_is_no_hanging(start: Start, random_model: Path) -> None:
    server = start(random_model, "--step-timeout", "0.8").wait_ready()
    for _ in range(3):
        time.sleep(1.2)
        assert server.complete().status_code == 200
    assert server.end() == 0


def test_the_engine_ends_with_its_parent(start: Start, random_model: Path) -> None:
    server = start(random_model).wait_ready()
    engine = server.engine()
    server.process.kill()
    server.process.wait(5)
    engine.wait(5)


def test_a_busy_port_is_known_before_anything_is_loaded(start: Start, random_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(random_model, port=port)
        assert server.process.wait(30) == 2
        log = server.log
        assert f"--port {port}" in log and "Traceback" not in log and "engine" not in log


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("/no/such/folder", [], "/no/such/folder"),
        (None, ["--max-model-len", "9999"], "--max-model-len 9999 exceeds the model's own 256"),
        (None, ["--kv-cache-memory", "1KiB"], "--kv-cache-memory"),
        (None, ["--prot", "1"], "--port"),
    ],
)
def test_a_mistake_at_start_is_one_clear_line(
    start: Start,
    random_model: Path,
    model: str | None,
    flags: list[str],
    words: str,
) -> None:
    server = start(model or random_model, *flags)
    assert server.process.wait(60) == 2
    log = server.log
    assert words in log and "Traceback" not in log


def test_ready_means_that_the_next_request_completes(start: Start, random_model: Path) -> None:
    server = start(random_model)
    seen = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            code = server.client.get("/health").status_code
        except httpx.TransportError:
            continue
        answer = server.complete(max_tokens=1)
        assert answer.status_code in ((200,) if code == 200 else (200, 503))
        seen.append(code)
        if code == 200:
            break
        assert server.client.get("/live").status_code == 200
        time.sleep(0.05)
    assert seen[-1] == 200 and 503 in seen


def test_two_servers_live_side_by_side(start: Start, random_model: Path) -> None:
    pair = [start(random_model), start(random_model)]
    answers = [server.wait_ready().complete().json()["choices"] for server in pair]
    assert answers[0] == answers[1]
    assert [server.end() for server in pair] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_with_0(
    start: Start, random_model: Path, number: signal.Signals
) -> None:
    server = start(random_model)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if server.client.get("/live").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.02)
    assert server.client.get("/health").status_code == 503
    children = server.children()
    # As a terminal does it: the signal goes to every process of the group.
    for process in [psutil.Process(server.process.pid), *children]:
        process.send_signal(number)
    assert server.process.wait(10) == 0
    assert not psutil.wait_procs(children, timeout=5)[1], "left behind"
    assert "Traceback" not in server.log
