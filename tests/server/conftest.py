"""A real server: its processes, over loopback, started as a user starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from moe_serve.llm import LLM
from moe_serve.sampling_params import SamplingParams

START_SECONDS = 60
# In the environment of all that a server starts, directly or not: it outlives parents.
MARK = "TEST_SERVER_MARK"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """`moe-serve serve` in a child process; `log` is what it wrote.

    `torchrun`, `deepspeed`: flags of that launcher, where it shall start the ranks. `within`: the
    start of the command, as `ip netns exec NAME`, where it shall not run right here.
    """

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        port: int | None = None,
        torchrun: Sequence[str] | None = None,
        deepspeed: Sequence[str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile(mode="w+")
        self._mark = uuid.uuid4().hex
        launcher = [sys.executable, "-m"] if torchrun is None else [*TORCHRUN, *torchrun, "-m"]
        if deepspeed is not None:
            launcher = [*DEEPSPEED, *deepspeed, "--module"]
        # DeepSpeed's binding of cores is to tell how many threads there are.
        threads = [] if deepspeed is not None else ["--num-threads", "1"]
        command = [*launcher, "moe_serve", "serve", str(model), "--port", str(self.port), *threads]
        self.process = subprocess.Popen(
            [*within, *command, *flags],
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {MARK: self._mark, "OMP_NUM_THREADS": "1"},
            # As a shell starts it, where Ctrl-C reaches all of the group.
            process_group=0 if deepspeed is not None else None,
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

    def processes(self) -> list[psutil.Process]:
        """All that live of what was started here, wherever they are in the process tree."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False

    def rank(self, number: int) -> psutil.Process | None:
        """The process that a launcher started as that rank; None where it is not there."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                is_launched = "serve" in process.cmdline()
                if is_launched and process.environ().get("RANK") == str(number):
                    return process
        return None

    def wait_rank(self, number: int, seconds: float = 30) -> psutil.Process:
        """The process of that rank as soon as it is there."""
        deadline = time.monotonic() + seconds
        while (process := self.rank(number)) is None:
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.02)
        return process

    def check_gone(self, seconds: float = 5) -> None:
        """Nothing that was started here lives on, after that time at most."""
        deadline = time.monotonic() + seconds
        while alive := self.processes():
            assert time.monotonic() < deadline, f"left behind: {alive}\n{self.log}"
            time.sleep(0.05)

    def close(self) -> None:
        self.client.close()
        # Again and again: one that starts others may be among them.
        while self.process.poll() is None or self.processes():
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        self._log.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """start(model, *flags, port=..., torchrun=...) -> a Server that need not be ready yet."""
    servers: list[Server] = []

    def make(model: Path | str, *flags: str, **where: Any) -> Server:
        servers.append(Server(model, *flags, **where))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def any_port() -> Callable[[], int]:
    """any_port() -> one that was free a moment ago."""
    return free_port


@pytest.fixture(scope="session")
def make_server() -> type[Server]:
    """As `start`, but whoever calls it closes the server."""
    return Server


@pytest.fixture(scope="module")
def one_rank(random_model: Path) -> Iterator[Callable[[Sequence[str], int], list[str]]]:
    """one_rank(prompts, max_tokens) -> greedy texts of the model on one rank, in float32."""
    num_threads = torch.get_num_threads()
    options = SamplingParams(temperature=0, ignore_eos=True)
    with LLM(
        str(random_model), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=512
    ) as llm:

        def texts(prompts: Sequence[str], max_tokens: int) -> list[str]:
            params = dataclasses.replace(options, max_tokens=max_tokens)
            return [answer.outputs[0].text for answer in llm.generate(prompts, params)]

        yield texts
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    """One server for the tests that leave it as they found it."""
    made = Server(random_model, "--served-model-name", "m")
    try:
        yield made.wait_ready()
    finally:
        made.close()
