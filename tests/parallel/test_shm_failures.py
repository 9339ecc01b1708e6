"""What ranks over shared memory do when one of them dies, stops, or goes astray."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from moe_serve.kernels.cpu.build import BuildError
from moe_serve.parallel.shm.library import load
from moe_serve.parallel.shm.shm_collectives import ShmCollectives, ShmError
from tests.shm_ranks import shm_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    try:
        load()
    except BuildError as error:
        pytest.skip(str(error))


def test_a_rank_that_dies_is_named_to_all_who_wait_and_the_group_is_of_no_more_use() -> None:
    with shm_ranks(3) as ranks:
        for rank in ranks[:2]:
            rank.tell("call", "all_gather", 8)
        assert ranks[0].is_silent(0.1)
        ranks[2].process.kill()
        for rank in ranks[:2]:
            assert rank.answer() == "shm all_gather: rank 2 is gone"
            rank.tell("call", "all_reduce", 8)
            assert rank.answer() == "shm all_reduce: rank 2 is gone"


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "all_to_all"])
def test_a_rank_that_dies_while_it_copies_leaves_nothing_behind(name: str) -> None:
    before = set(os.listdir("/dev/shm"))
    with shm_ranks(3) as ranks:
        for rank in ranks:
            rank.tell("calls", name, 3_000_000)
        assert ranks[0].is_silent(0.2)
        ranks[1].process.kill()
        for rank in (ranks[0], ranks[2]):
            assert rank.answer() == f"shm {name}: rank 1 is gone"
    assert set(os.listdir("/dev/shm")) <= before


def test_a_rank_that_stopped_is_named_at_the_deadline_and_learns_of_it() -> None:
    with shm_ranks(2, timeout=1.0) as ranks:
        os.kill(ranks[1].process.pid, signal.SIGSTOP)
        ranks[0].tell("call", "all_to_all", 8)
        assert ranks[0].answer() == "shm all_to_all: rank 1 did not come within 1 s"
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        ranks[1].tell("call", "all_to_all", 8)
        assert ranks[1].answer() == "shm all_to_all: rank 1 did not come within 1 s"


def test_a_rank_that_closed_its_group_is_gone() -> None:
    with shm_ranks(2) as ranks:
        for rank in ranks:
            rank.tell("call", "all_reduce", 4)
        assert [rank.answer() for rank in ranks] == ["", ""]
        ranks[1].tell("close")
        ranks[0].tell("call", "all_reduce", 4)
        assert ranks[0].answer() == "shm all_reduce: rank 1 is gone"
        ranks[1].answer()
        ranks[1].tell("call", "all_reduce", 4)
        assert ranks[1].answer() == "shm all_reduce: the group is closed"


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (("all_gather", 64), ("all_reduce", 64), "all_reduce of 64 bytes"),
        (("all_reduce", 64), ("all_reduce", 3_000_000), "all_reduce of 3000000 bytes"),
        (("all_to_all", 64), ("all_to_all", 128), "all_to_all of 128 bytes"),
    ],
)
def test_calls_that_differ_are_found_instead_of_mixed_up(
    ours: tuple[str, int], theirs: tuple[str, int], told: str
) -> None:
    with shm_ranks(2) as ranks:
        ranks[0].tell("call", *ours)
        ranks[1].tell("call", *theirs)
        errors = [rank.answer() for rank in ranks]
        assert all("did not call the same as rank" in error for error in errors)
        found = f"shm {ours[0]}: rank 1 did not call the same as rank 0, but {told}"
        # Whoever comes second may have heard of it first.
        assert found == errors[0] or "the same as rank 1" in errors[0]


def test_who_waits_uses_no_core() -> None:
    with shm_ranks(2) as ranks:
        ranks[0].tell("cpu_seconds")
        before = ranks[0].answer()
        ranks[0].tell("call", "all_gather", 8)
        assert ranks[0].is_silent(1.0)
        ranks[1].tell("call", "all_gather", 8)
        assert (ranks[0].answer(), ranks[1].answer()) == ("", "")
        ranks[0].tell("cpu_seconds")
        assert ranks[0].answer() - before < 0.3


def test_a_child_of_fork_is_refused_and_its_parent_goes_on() -> None:
    with shm_ranks(2) as ranks:
        ranks[0].tell("call_in_child", "all_gather", 8)
        assert re.fullmatch(
            r"shm all_gather: process \d+ is a child of rank 0, and no rank itself",
            ranks[0].answer(),
        )
        for rank in ranks:
            rank.tell("call", "all_gather", 8)
        assert [rank.answer() for rank in ranks] == ["", ""]


def test_closed_groups_leave_neither_files_nor_memory() -> None:
    before = len(os.listdir("/proc/self/fd"))
    groups = [ShmCollectives.create(size, 1.0) for size in (2, 7, 64)]
    with pytest.raises(ShmError, match="the file has another size"):
        ShmCollectives.find(groups[0].address, 1, 3, 1.0)
    # Not the same process's own.
    groups.append(ShmCollectives.create(2, 1.0))
    assert Path("/proc/self/maps").read_text().count("memfd:moe_serve") == len(groups)
    for group in groups:
        group.close()
    del groups
    assert "memfd:moe_serve" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_not_there_is_told() -> None:
    group = ShmCollectives.create(2, 1.0)
    address = group.address
    group.close()
    with pytest.raises(ShmError, match=f"cannot open the memory of process {os.getpid()}: No such"):
        ShmCollectives.find(address, 1, 2, 1.0)
