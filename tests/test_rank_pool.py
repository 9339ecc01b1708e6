"""The pool of rank processes itself: it tells what went wrong, leaves nothing, and goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from moe_serve.parallel.group import RankGroup
from tests.rank_pool import RankError, RankPool

pytestmark = pytest.mark.dist


def ranks_of(group: RankGroup, factor: int) -> list[int]:
    ranks: list[int] = group.all_gather(torch.tensor([group.rank * factor])).tolist()
    return ranks


def process_id(group: RankGroup) -> int:
    return os.getpid()


def one_raises(group: RankGroup) -> None:
    if group.rank == 1:
        raise ValueError("no such luck")
    ranks_of(group, 1)


def one_dies(group: RankGroup) -> None:
    if group.rank == 1:
        os._exit(3)
    ranks_of(group, 1)


def one_sleeps(group: RankGroup) -> None:
    if group.rank == 0:
        time.sleep(100)
    ranks_of(group, 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


def test_the_first_ranks_run_a_function_and_the_others_wait(pool: RankPool) -> None:
    for size in (1, 2, 3, 2):
        assert pool.run(ranks_of, 10, size=size) == [[0, 10, 20][:size]] * size


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (one_raises, "rank 1: (.|\n)*ValueError: no such luck"),
        (one_dies, "rank 1: died with exit code 3"),
        (one_sleeps, "rank 0 is late:\n(.|\n)*in one_sleeps"),
    ],
)
def test_a_failure_is_told_and_ends_every_process(
    pool: RankPool, function: Callable[..., None], told: str
) -> None:
    processes = [psutil.Process(pid) for pid in pool.run(process_id)]
    start = time.monotonic()
    with pytest.raises(RankError, match=told):
        pool.run(function, deadline=2)
    assert time.monotonic() - start < 5
    assert not any(process.is_running() for process in processes)
    assert pool.run(ranks_of, 1) == [[0, 1, 2]] * 3


def test_closing_ends_every_process() -> None:
    with RankPool(2) as pool:
        processes = [psutil.Process(pid) for pid in pool.run(process_id)]
    assert not any(process.is_running() for process in processes)
