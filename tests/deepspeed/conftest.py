"""Checkpoints of trainings with DeepSpeed, made once for all test processes."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
from torch import Tensor

from tests.conftest import save_byte_tokenizer

DEADLINE = 100.0
PROGRAM = Path(__file__).with_name("training.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Trainings:
    """By the names of `training.RUNS`. Tests that change files work on copies."""

    top: Path

    def folder(self, run: str) -> Path:
        """As a trainer leaves it: config.json, tokenizer, `latest`, global_step<n>/."""
        return self.top / run

    def step(self, run: str) -> Path:
        return self.folder(run) / (self.folder(run) / "latest").read_text()

    def truth(self, run: str) -> dict[str, Tensor]:
        """All tensors, as DeepSpeed's own reader or the live model has them."""
        return safetensors.torch.load_file(f"{self.folder(run)}.safetensors")


@pytest.fixture(scope="session")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    if find_spec("deepspeed") is None:
        pytest.skip("needs the extra deepspeed")
    base = tmp_path_factory.getbasetemp()
    top = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "deepspeed"
    top.mkdir(exist_ok=True)
    with (top / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (top / "done").exists():
            train(top)
            (top / "done").touch()
    return Trainings(top)


def train(top: Path) -> None:
    """In processes of their own; none outlives this."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    log = top / "training.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, top], env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        code: int | None = process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Else it has ended, and its ranks before it.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        reason = f"exit code {code}" if code is not None else f"not done in {DEADLINE} s"
        pytest.fail(f"training: {reason}\n{log.read_text()[-6000:]}", pytrace=False)
    for config in top.glob("*/config.json"):
        save_byte_tokenizer(config.parent)


@pytest.fixture
def copy(trainings: Trainings, tmp_path: Path) -> Callable[[str], Path]:
    """copy("mixtral-zero1") -> a folder that a test may change."""

    def make(run: str) -> Path:
        return Path(shutil.copytree(trainings.folder(run), tmp_path / run))

    return make
