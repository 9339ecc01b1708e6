"""Ranks that die or stop in the middle of their work: told to every client, then served again.

Which process is hit, how and when is drawn from a seed. 2 seeds by default; the environment
variable TEST_KILL_SEEDS gives another number (`TEST_KILL_SEEDS=20 pytest -s <this file>`
takes some minutes, and prints how long each took to be noticed).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.streams import Stream, wait_chunks, wait_ends

# The tests share a server that restarts, which takes its time on a busy machine.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

# What the `start` fixture is: conftest's Server has no importable name.
Start = Callable[..., Any]
OneRank = Callable[[Sequence[str], int], list[str]]

NUM_SEEDS = int(os.environ.get("TEST_KILL_SEEDS", "2"))
COLLECTIVE_TIMEOUT = 4
# Noticed within the timeout; then the reason is looked for, and told.
ENDED_SECONDS = COLLECTIVE_TIMEOUT + 6
AGAIN_SECONDS = 90
SMALL = ["--dtype", "float32", "--num-kv-blocks", "512"]
NUM_STREAMS, NUM_TOKENS = 20, 200


@pytest.fixture
def expected(one_rank: OneRank) -> dict[str, str]:
    """Prompt -> its text."""
    prompts = [f"{number} " * number for number in range(1, 6)]
    return dict(zip(prompts, one_rank(prompts, NUM_TOKENS), strict=True))


@pytest.fixture(scope="module")
def _kept() -> Iterator[list[Any]]:
    """At most one server: the one that the tests share."""
    kept: list[Any] = []
    yield kept
    for server in kept:
        server.close()


@pytest.fixture
def server(make_server: Start, random_model: Path, _kept: list[Any]) -> Any:
    """Two ranks under a torchrun that restarts them; the same for all tests while it is well."""
    if _kept and not is_well(_kept[0]):
        _kept.pop().close()
    if not _kept:
        flags = ["--enable-expert-parallel", "--collective-timeout", str(COLLECTIVE_TIMEOUT)]
        torchrun = ["--max-restarts", "100", "--nproc-per-node", "2"]
        _kept.append(make_server(random_model, *flags, *SMALL, torchrun=torchrun))
    return _kept[0].wait_ready()


def is_well(server: Any) -> bool:
    with contextlib.suppress(httpx.TransportError):
        status: int = server.client.get("/health").status_code
        return server.process.poll() is None and status == 200
    return False


def open_streams(server: Any, expected: dict[str, str]) -> list[Stream]:
    prompts = list(expected)
    return [
        Stream(server.url, prompts[number % len(prompts)], max_tokens=NUM_TOKENS)
        for number in range(NUM_STREAMS)
    ]


def wait_again(server: Any, before: psutil.Process, expected: dict[str, str]) -> float:
    """Until another server process than `before` answers, rightly; the seconds that took."""
    began = time.monotonic()
    while time.monotonic() - began < AGAIN_SECONDS:
        assert server.process.poll() is None, server.log
        with contextlib.suppress(httpx.TransportError):
            if not is_same(server.rank(0), before):
                if server.client.get("/health").status_code == 200:
                    check_texts(server, expected)
                    return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError(f"not back after {AGAIN_SECONDS} s: {server.log}")


def is_same(found: psutil.Process | None, before: psutil.Process) -> bool:
    return found is None or found == before


def check_texts(server: Any, expected: dict[str, str]) -> None:
    for prompt in list(expected)[:2]:
        answer = server.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected[prompt]


def check_end(stream: Stream, expected: dict[str, str]) -> None:
    """In full, or with an error event and nothing wrong before it; or too late to start."""
    if stream.refusal is not None:
        assert stream.refusal == 503
        return
    assert stream.was_done and stream.breakage is None, stream
    text = expected[stream.prompt]
    if stream.error is None:
        assert stream.text == text
    else:
        assert "engine ended" in stream.error["message"]
        assert text.startswith(stream.text.rstrip("\ufffd"))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_stream_ends_when_a_rank_is_hit_and_service_returns(
    server: Any, expected: dict[str, str], seed: int
) -> None:
    choice = random.Random(seed)
    # In turn, so that a few seeds have one of each.
    number = [signal.SIGKILL, signal.SIGSTOP][seed % 2]
    name = [["rank 1", "engine"], ["engine", "rank 1"]][seed // 2 % 2][seed % 2]
    num_chunks = choice.randrange(1, NUM_STREAMS * NUM_TOKENS // 2)
    before = server.rank(0)
    victim = server.rank(1) if name == "rank 1" else server.engine()
    streams = open_streams(server, expected)
    wait_chunks(streams, num_chunks, seconds=60)
    assert not any(stream.error for stream in streams), f"too early: {server.log}"
    victim.send_signal(number)
    hit = time.monotonic()
    noticed = wait_ends(streams, ENDED_SECONDS) - hit
    for stream in streams:
        check_end(stream, expected)
    num_errors = sum(not stream.was_done or stream.error is not None for stream in streams)
    back = wait_again(server, before, expected)
    print(
        f"seed {seed}: {number.name} {name} after {num_chunks} chunks: {num_errors} errors, "
        f"last end after {noticed:.2f} s, answers again after {back:.2f} s"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP][: 1 + (NUM_SEEDS > 3)])
def test_ranks_end_with_the_server_process_and_all_come_back(
    server: Any, expected: dict[str, str], number: signal.Signals
) -> None:
    before, engine, rank = server.rank(0), server.engine(), server.rank(1)
    streams = open_streams(server, expected)
    wait_chunks(streams, 50, seconds=60)
    before.send_signal(number)
    # Nobody is left to tell its clients more.
    wait_ends(streams, ENDED_SECONDS)
    assert not psutil.wait_procs([before, engine, rank], timeout=ENDED_SECONDS)[1]
    wait_again(server, before, expected)


def test_nothing_outlives_torchrun(server: Any, expected: dict[str, str]) -> None:
    streams = open_streams(server, expected)
    wait_chunks(streams, 50, seconds=60)
    server.process.kill()
    server.process.wait(5)
    server.check_gone(seconds=10)
    wait_ends(streams, 1)


def test_without_restarts_a_dead_rank_is_the_end(
    start: Start, random_model: Path, expected: dict[str, str]
) -> None:
    # Not by shared memory, over which all might be done before the rank is killed.
    flags = ["-tp", "2", "--comm-backend", "gloo", "--collective-timeout", "4", *SMALL]
    server = start(random_model, *flags).wait_ready()
    streams = open_streams(server, expected)
    wait_chunks(streams, 50, seconds=60)
    server.rank(1).kill()
    wait_ends(streams, ENDED_SECONDS)
    for stream in streams:
        check_end(stream, expected)
        # The first ones may be done before the last ones are on their way.
        assert stream.error is None or "rank 1" in stream.error["message"]
    assert any(stream.error for stream in streams)
    assert server.process.wait(ENDED_SECONDS) == 1
    server.check_gone()


def test_an_idle_server_ends_at_once_with_its_rank(start: Start, random_model: Path) -> None:
    """The launcher asks for an orderly end, which must not wait for the rank that is gone."""
    server = start(random_model, "-dp", "2", *SMALL).wait_ready()
    engine = server.engine()
    server.rank(1).kill()
    # A client of the engine that waits in vain would do so for 5 seconds.
    assert not psutil.wait_procs([engine], timeout=4.5)[1]
    assert server.process.wait(ENDED_SECONDS) == 1
    server.check_gone()


@pytest.mark.parametrize("seed", range(1 + NUM_SEEDS // 4))
def test_a_rank_that_dies_at_start_ends_all(start: Start, random_model: Path, seed: int) -> None:
    server = start(random_model, "-tp", "2", *SMALL)
    victim = server.wait_rank(1)
    # At once; or while it imports, meets the others, loads, or has just become ready.
    time.sleep(random.Random(seed).uniform(0, 6) if seed else 0)
    victim.kill()
    assert server.process.wait(40) == 1
    server.check_gone()
