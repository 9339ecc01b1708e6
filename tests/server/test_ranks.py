"""A server over several ranks: ready, right, drained, gone; and refused before it starts."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch

from tests.server.streams import Stream, wait_chunks, wait_ends

pytestmark = pytest.mark.dist

# What the `start` fixture is: conftest's Server has no importable name.
Start = Callable[..., Any]
OneRank = Callable[[Sequence[str], int], list[str]]

SMALL = ["--dtype", "float32", "--num-kv-blocks", "512"]
PROMPTS = ["abc", "Dorothy looked", "x" * 57, "?"]
TWO = ["--nproc-per-node", "2"]


def text(server: Any, prompt: str, max_tokens: int = 40) -> str:
    answer = server.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def texts(server: Any, prompts: Sequence[str]) -> list[str]:
    """All at once; the answers in order."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: text(server, prompt), prompts))


def health(server: Any) -> int | None:
    """None while nothing listens."""
    try:
        code: int = server.client.get("/health").status_code
        return code
    except httpx.TransportError:
        return None


def wait_live(server: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while health(server) is None:
        assert time.monotonic() < deadline and server.process.poll() is None, server.log
        time.sleep(0.05)


def end_launched(server: Any, number: signal.Signals = signal.SIGTERM) -> int:
    """End it by its launcher; the exit code, when nothing is left."""
    server.process.send_signal(number)
    code: int = server.process.wait(30)
    server.check_gone()
    return code


def test_moe_serve_starts_the_ranks_and_drains_them(
    start: Start, random_model: Path, one_rank: OneRank
) -> None:
    server = start(random_model, "--tensor-parallel-size", "2", "--enable-expert-parallel", *SMALL)
    stopped = server.wait_rank(1)
    stopped.suspend()
    wait_live(server)
    time.sleep(2)
    # Not ready before the last rank is, however long that takes.
    assert health(server) == 503
    stopped.resume()
    server.wait_ready()
    for rank in range(2):
        assert f"rank {rank} has read its 0.4 MiB of weights" in server.log
    assert "2 = 1 x 2 (lanes x tensor-parallel), experts spread over 2" in server.log
    assert texts(server, PROMPTS) == one_rank(PROMPTS, 40)

    stream = Stream(server.url, "abc", max_tokens=200)
    wait_chunks([stream], 5, seconds=20)
    assert end_launched(server) == 0, server.log
    wait_ends([stream], seconds=5)
    assert stream.was_done and stream.error is None
    assert [stream.text] == one_rank(["abc"], 200)
    assert "Traceback" not in server.log


def test_torchruns_ranks_are_one_lane_by_default(
    start: Start, random_model: Path, one_rank: OneRank
) -> None:
    server = start(random_model, *SMALL, "--deterministic", torchrun=TWO).wait_ready()
    assert "2 = 1 x 2 (lanes x tensor-parallel), experts split within a lane" in server.log
    assert texts(server, PROMPTS) == one_rank(PROMPTS, 40)
    stream = Stream(server.url, "abc", max_tokens=200)
    wait_chunks([stream], 5, seconds=20)
    end_launched(server)
    wait_ends([stream], seconds=5)
    assert stream.was_done and stream.error is None
    assert [stream.text] == one_rank(["abc"], 200)


def test_idle_lanes_keep_step_with_busy_ones(
    start: Start, random_model: Path, one_rank: OneRank
) -> None:
    """One request leaves a lane idle, which must still join in; idle time is not death."""
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--collective-timeout", "2"]
    server = start(random_model, *flags, *SMALL, torchrun=TWO).wait_ready()
    assert "2 = 2 x 1 (lanes x tensor-parallel), experts spread over 2" in server.log
    expected = one_rank(PROMPTS, 40)
    assert [text(server, PROMPTS[0])] == expected[:1]
    time.sleep(5)
    assert texts(server, PROMPTS[:2]) == expected[:2]
    assert texts(server, PROMPTS) == expected
    end_launched(server)
    assert "ended" not in server.log


def test_experts_need_not_divide_by_ranks(
    start: Start, random_model: Path, one_rank: OneRank
) -> None:
    """8 experts over 3 ranks: 3, 3 and 2."""
    flags = ["--data-parallel-size", "3", "--enable-expert-parallel"]
    server = start(random_model, *flags, *SMALL).wait_ready()
    assert texts(server, PROMPTS) == one_rank(PROMPTS, 40)
    assert end_launched(server, signal.SIGINT) == 0, server.log


TENSOR = "--tensor-parallel-size"


def test_a_signal_while_ranks_start_ends_them(start: Start, random_model: Path) -> None:
    server = start(random_model, "-tp", "2", *SMALL)
    server.wait_rank(1)
    wait_live(server)
    assert end_launched(server) == 0, server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([TENSOR, "3"], f"{TENSOR} 3: the model's 4 attention heads do not divide by 3; use"),
        (["-tp", "2", "--all2all-backend", "all_to_all"], "add --enable-expert-parallel"),
        # Known only when all ranks have their weights.
        (["-tp", "2", "--kv-cache-memory", "1KiB"], "raise --kv-cache-memory"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    start: Start, random_model: Path, flags: list[str], words: str
) -> None:
    check_refused(start(random_model, *flags), words, 2)


def test_kv_heads_that_cannot_be_shared_are_refused(
    start: Start, random_model: Path, tmp_path: Path
) -> None:
    # Told from the config alone: no weights here.
    config = json.loads((random_model / "config.json").read_text())
    config |= {"num_attention_heads": 6, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = start(tmp_path, TENSOR, "2")
    check_refused(server, "the model's 3 KV heads (6 attention heads) can neither be divided", 2)


def test_what_only_rank_0_finds_out_is_told(
    start: Start, random_model: Path, tmp_path: Path
) -> None:
    """The launcher ends all ranks when one ends; the others must not be the first."""
    folder = tmp_path / "damaged"
    shutil.copytree(random_model, folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["lm_head.weight"].fill_(float("nan"))
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    check_refused(start(folder, "-tp", "2", *SMALL), "the weights are damaged", 2)


def test_torchrun_with_another_number_of_ranks_is_told_both(
    start: Start, random_model: Path
) -> None:
    """torchrun ends all ranks when one ends; that must not be before one has told why."""
    server = start(random_model, TENSOR, "3", torchrun=TWO)
    check_refused(server, f"started 2; start 3 ranks, or use {TENSOR} 2", 1)
    assert "exitcode  : 2" in server.log


def test_a_busy_port_ends_all_ranks(start: Start, random_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_refused(start(random_model, "-tp", "2", port=port), f"--port {port}", 2)


def check_refused(server: Any, words: str, code: int) -> None:
    """It ends by itself with that code and one line for the user; nothing stays."""
    assert server.process.wait(40) == code, server.log
    server.check_gone()
    log = server.log
    told = [line for line in log.splitlines() if line.startswith("moe-serve: error: ")]
    assert len(told) == 1 and words in told[0], log
    # torchrun shows its own.
    assert log.count("Traceback") == (0 if code == 2 else 1), log
