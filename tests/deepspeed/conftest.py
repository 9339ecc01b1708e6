"""Checkpoints of trainings with DeepSpeed, made once for all test processes."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
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
    """Two ranks over gloo, in processes of their own; none outlives this."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    processes = []
    for rank in ("0", "1"):
        with (top / f"rank{rank}.txt").open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, PROGRAM, top],
                    env=environment | {"RANK": rank, "LOCAL_RANK": rank},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                )
            )  # fmt: skip
    end = time.monotonic() + DEADLINE
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.returncode for process in processes)
            if failed or time.monotonic() > end:
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        texts = [(top / f"rank{rank}.txt").read_text()[-3000:] for rank in range(2)]
        pytest.fail("the training failed:\n" + "\n---\n".join(texts), pytrace=False)
    for config in top.glob("*/config.json"):
        save_byte_tokenizer(config.parent)


@pytest.fixture
def copy(trainings: Trainings, tmp_path: Path) -> Callable[[str], Path]:
    """copy("mixtral-zero1") -> a folder that a test may change."""

    def make(run: str) -> Path:
        return Path(shutil.copytree(trainings.folder(run), tmp_path / run))

    return make
