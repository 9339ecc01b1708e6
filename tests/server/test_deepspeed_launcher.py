"""Ranks that DeepSpeed's launcher starts, as processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.streams import Stream, wait_chunks, wait_ends

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra deepspeed"),
]

# What the `start` fixture is: conftest's Server has no importable name.
Start = Callable[..., Any]
OneRank = Callable[[Sequence[str], int], list[str]]

SMALL = ["--dtype", "float32", "--num-kv-blocks", "512"]
# Stand-ins for what is not installed: they do what DeepSpeed uses of it.
NUMACTL = """#!{python}
import os, sys
if sys.argv[1:] == ["--hardware"]:
    print("available: 1 nodes (0)")
    print("node 0 cpus:", *range(os.cpu_count()))
    sys.exit()
at = sys.argv.index("-C")
first, _, last = sys.argv[at + 1].partition("-")
os.sched_setaffinity(0, range(int(first), int(last or first) + 1))
os.execv(sys.argv[at + 2], sys.argv[at + 2:])
"""
PACKAGES = "#!/bin/sh\nexit 0\n"


@pytest.fixture
def numactl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one where it is."""
    if shutil.which("numactl") is None:
        for name, text in (("numactl", NUMACTL), ("dpkg", PACKAGES)):
            file = tmp_path / name
            file.write_text(text.format(python=sys.executable))
            file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_each_rank_keeps_to_its_cores_and_ctrl_c_lets_a_stream_end(
    start: Start,
    random_model: Path,
    one_rank: OneRank,
    numactl: None,
    any_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    bound = ["--bind_cores_to_rank", "--bind_core_list", ",".join(map(str, cores))]
    master = ["--master_port", str(any_port()), "--num_gpus", "2"]
    server = start(random_model, *SMALL, deepspeed=[*bound, *master]).wait_ready()
    assert "2 = 1 x 2 (lanes x tensor-parallel)" in server.log
    assert "1 thread a rank" in server.log
    for rank, core in enumerate(cores):
        process = server.rank(rank)
        for one in (process, *process.children(recursive=True)):
            assert psutil.Process(one.pid).cpu_affinity() == [core]

    stream = Stream(server.url, "abc", max_tokens=200)
    wait_chunks([stream], 5, seconds=20)
    os.killpg(server.process.pid, signal.SIGINT)
    # The command itself ends at once, and leaves the rest to the launcher of this host.
    wait_ends([stream], seconds=30)
    server.check_gone(seconds=30)
    assert stream.was_done and stream.error is None, server.log
    assert [stream.text] == one_rank(["abc"], 200)
