"""Ranks of one start meet in a store that remembers earlier starts."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from moe_serve.parallel.meeting import meet

Connect = Callable[[], Any]
PATIENCE = 20.0


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect() -> another client of one store, as each rank has its own."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = timedelta(seconds=30)
    yield lambda: dist.TCPStore("127.0.0.1", master.port, is_master=False, timeout=deadline)


def start(connect: Connect, delays: dict[int, float]) -> dict[int, Any]:
    """Rank -> what it got, when each comes after that many seconds. Nobody goes on before all
    have come.
    """
    last = time.monotonic() + max(delays.values())

    def come(rank: int, delay: float) -> Any:
        time.sleep(delay)
        store = meet(connect(), rank, len(delays), PATIENCE)
        assert time.monotonic() >= last, f"rank {rank} did not wait for others"
        return store

    with concurrent.futures.ThreadPoolExecutor(len(delays)) as pool:
        jobs = {rank: pool.submit(come, rank, delay) for rank, delay in delays.items()}
        return {rank: job.result(PATIENCE + 5) for rank, job in jobs.items()}


def check_shared(stores: dict[int, Any]) -> None:
    """What one writes all can read."""
    stores[0].set("word", "of this start")
    assert all(store.get("word") == b"of this start" for store in stores.values())


@pytest.mark.parametrize("delays", [{0: 0.3, 1: 0, 2: 0}, {0: 0, 1: 0, 2: 0.3}])
def test_ranks_meet_whoever_comes_first(connect: Connect, delays: dict[int, float]) -> None:
    check_shared(start(connect, delays))


def test_a_restart_knows_nothing_of_the_start_before(connect: Connect) -> None:
    """Other ranks are there first, and find all that their predecessors and rank 0 had said."""
    first = start(connect, {0: 0, 1: 0, 2: 0})
    check_shared(first)
    second = start(connect, {0: 0.4, 1: 0, 2: 0.2})
    assert not any(store.check(["word"]) for store in second.values())
    check_shared(second)


def test_a_start_that_was_cut_off_is_forgotten(connect: Connect) -> None:
    """Rank 0 had named it, rank 1 was there, rank 2 died before it came."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(meet, connect(), rank, 3, 0.3) for rank in (0, 1)]
        assert [type(job.exception(10)) for job in jobs] == [dist.DistStoreError] * 2
    check_shared(start(connect, {0: 0.3, 1: 0, 2: 0}))


@pytest.mark.parametrize("has_old_start", [False, True])
def test_patience_with_rank_0_ends(connect: Connect, has_old_start: bool) -> None:
    if has_old_start:
        start(connect, {0: 0, 1: 0})
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        meet(connect(), 1, 2, 0.5)
    assert 0.4 < time.monotonic() - began < 5
