"""A server of its own: how soon it is ready, and what its HTTP side spends on a token."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DEADLINE = 120.0
POLL_SECONDS = 0.01


class Server(NamedTuple):
    """`seconds`: from the start of its process until it was ready."""

    process: subprocess.Popen[bytes]
    port: int
    seconds: float


@contextlib.contextmanager
def serving(model: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "moe_serve", "serve", model, "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            if process.poll() is not None or time.perf_counter() - started > DEADLINE:
                raise SystemExit("the server did not come up")
            time.sleep(POLL_SECONDS)
        yield Server(process, port, time.perf_counter() - started)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Streamed(NamedTuple):
    num_tokens: int
    gaps: list[float]


async def stream(port: int, number: int, options: argparse.Namespace, path: str) -> Streamed:
    """Tokens that the server counts, and seconds between events."""
    body: dict[str, object] = {
        "max_tokens": options.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if path == "/v1/completions":
        body["prompt"] = [5 + number] * options.context
    else:
        body["messages"] = [{"role": "user", "content": f"Tell story {number}"}]
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
    writer.write(head.encode() + str(len(payload)).encode() + b"\r\n\r\n" + payload)
    num_tokens, times = 0, []
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            if b'"completion_tokens"' in line:
                num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    writer.close()
    return Streamed(num_tokens, [b - a for a, b in zip(times, times[1:], strict=False)])


async def stream_all(port: int, options: argparse.Namespace, path: str) -> list[Streamed]:
    jobs = [stream(port, number, options, path) for number in range(options.requests)]
    return await asyncio.gather(*jobs)


def report_tokens(options: argparse.Namespace) -> list[str]:
    lines = [
        f"| {options.requests} streams of {options.model} | CPU ms a token, HTTP side"
        " | CPU ms a token, engine | tokens/s | ITL ms, median | ITL ms, 99 % |",
        "|---|---|---|---|---|---|",
    ]
    with serving(options.model) as server:
        for path in ("/v1/completions", "/v1/chat/completions"):
            asyncio.run(stream_all(server.port, options, path))
            tries = [measure(server, options, path) for _ in range(options.tries)]
            columns = [statistics.median(column) for column in zip(*tries, strict=True)]
            lines.append(f"| {path} | " + " | ".join(f"{value:.3f}" for value in columns) + " |")
    return lines


def measure(server: Server, options: argparse.Namespace, path: str) -> tuple[float, ...]:
    pids = [server.process.pid, engine_pid(server.process.pid)]
    before, started = [cpu_seconds(pid) for pid in pids], time.perf_counter()
    answers = asyncio.run(stream_all(server.port, options, path))
    seconds = time.perf_counter() - started
    used = [cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)]
    num_tokens = sum(answer.num_tokens for answer in answers)
    gaps = sorted(gap for answer in answers for gap in answer.gaps)
    return (
        *(1e3 * spent / num_tokens for spent in used),
        num_tokens / seconds,
        1e3 * statistics.median(gaps),
        1e3 * gaps[int(0.99 * len(gaps))],
    )


def engine_pid(server: int) -> int:
    """The child that uses most CPU; another one only tracks resources."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return max(map(int, children), key=cpu_seconds)


def report_start(options: argparse.Namespace) -> list[str]:
    found = []
    for _ in range(options.tries + 1):
        with serving(options.model) as server:
            found.append(server.seconds)
    # The first one fills the page cache.
    warm = found[1:]
    return [
        f"| start of `moe-serve serve {options.model}` to /health | seconds |",
        "|---|---|",
        f"| median of {len(warm)} | {statistics.median(warm):.2f} |",
        f"| fastest, slowest | {min(warm):.2f}, {max(warm):.2f} |",
    ]
