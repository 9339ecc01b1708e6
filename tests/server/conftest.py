"""A real server: its two processes, over loopback, started as a user starts it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

START_SECONDS = 60


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """`moe-serve serve` in a child process; `log` is what it wrote."""

    def __init__(self, model: Path | str, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile(mode="w+")
        command = [sys.executable, "-m", "moe_serve", "serve", str(model), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--num-threads", "1", *flags], stdout=self._log, stderr=self._log
        )
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"not ready after {START_SECONDS} s: {self.log}")

    def complete(self, prompt: object = "abc", **fields: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        return self.client.post("/v1/completions", json=body)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """The child that runs the model (the other one is multiprocessing's tracker)."""
        (engine,) = [child for child in self.children() if "spawn_main" in str(child.cmdline())]
        return engine

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal; the exit code. No child may stay behind."""
        children = self.children() if self.process.poll() is None else []
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, f"left behind: {alive}"
        return code

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            for child in self.children():
                child.kill()
            self.process.kill()
        self.process.wait(10)
        self._log.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """start(model, *flags, port=None) -> a Server that need not be ready yet."""
    servers: list[Server] = []

    def make(model: Path | str, *flags: str, port: int | None = None) -> Server:
        servers.append(Server(model, *flags, port=port))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    """One server for the tests that leave it as they found it."""
    made = Server(random_model, "--served-model-name", "m")
    try:
        yield made.wait_ready()
    finally:
        made.close()
