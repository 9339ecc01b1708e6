"""The log of a group's collectives: what it counts, and what of that leaves a rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.parallel.comm_log import (
    CommLog,
    CommRow,
    GroupCommunication,
    algorithm_bandwidth,
    bus_bandwidth,
)
from moe_serve.parallel.group import SOLO, RankGroup
from moe_serve.reports.communication import build, totals
from tests.rank_pool import RankPool

OPERATIONS = ["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "sum_disjoint", "gather"]
SIZES = [0, 1, 2, 3, 4, 7, 8, 17, 2**20 - 1, 2**20, 2**40]
CALLS = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS),
        st.sampled_from(SIZES),
        st.integers(0, 2**40),
        st.none() | st.floats(0, 10),
    )
)


@given(calls=CALLS)
def test_nothing_is_lost_and_each_call_is_in_the_row_of_its_size(calls: list[tuple]) -> None:
    log = CommLog()
    for call in calls:
        log.note(*call)
    rows = log.rows()
    assert sum(row.calls for row in rows) == len(calls)
    assert log.bytes_sent == sum(row.bytes_sent for row in rows) == sum(call[2] for call in calls)
    for row in rows:
        limit = 2 * row.least_bytes or 1
        own = [
            call
            for call in calls
            if call[0] == row.operation
            and row.least_bytes <= call[1] < limit
            and (call[3] is None) == (row.seconds is None)
        ]
        assert row.calls == len(own) > 0
        assert row.message_bytes == sum(call[1] for call in own)
        if row.seconds is not None:
            assert row.seconds == pytest.approx(sum(call[3] for call in own))
            assert row.longest_seconds == max(call[3] for call in own)
    log.clear()
    assert log.rows() == [] and log.bytes_sent == 0


@pytest.mark.parametrize(
    ("operation", "algorithm", "bus"),
    [
        # 4 ranks, messages of 100 bytes in all, 2 seconds. nccl-tests' S is 400 to gather.
        ("all_gather", 200.0, 150.0),
        ("gather", 200.0, 150.0),
        ("all_to_all", 50.0, 37.5),
        ("reduce_scatter", 50.0, 37.5),
        ("sum_disjoint", 50.0, 37.5),
        ("all_reduce", 50.0, 75.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, algorithm: float, bus: float) -> None:
    log = CommLog()
    log.note(operation, 40, 0, 1.5)
    log.note(operation, 60, 0, 0.5)
    (row,) = log.rows()
    assert (algorithm_bandwidth(row, 4), bus_bandwidth(row, 4)) == (algorithm, bus)
    log.clear()
    log.note(operation, 40, 0, None)
    (row,) = log.rows()
    assert algorithm_bandwidth(row, 4) is bus_bandwidth(row, 4) is None


def test_a_group_of_one_notes_nothing() -> None:
    x = torch.ones(3, 2)
    for operation in OPERATIONS:
        getattr(SOLO, operation)(x)
    assert SOLO.bytes_sent == 0 and SOLO.log.rows() == []


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


def exchange(group: RankGroup) -> tuple[GroupCommunication, int]:
    """Each operation, of 6 rows of 7 fp32; rows to ranks by (own rank + theirs)."""
    group.log.clear()
    x = torch.ones(6, 7)
    for operation in OPERATIONS:
        getattr(group, operation)(x)
    counts = [group.rank + other for other in range(group.size)]
    group.all_to_all(torch.ones(sum(counts), 7), counts, counts)
    return group.communication("lane"), group.bytes_sent


@pytest.mark.parametrize("size", [2, 3])
def test_what_leaves_each_rank_is_what_its_peers_are_due(pool: RankPool, size: int) -> None:
    told = pool.run(exchange, size=size)
    row, others = 28, size - 1
    for rank, (found, bytes_sent) in enumerate(told):
        assert (found.group, found.backend, found.size) == ("lane", "gloo", size)
        sent = dict.fromkeys(OPERATIONS, 0)
        for cell in found.rows:
            sent[cell.operation] += cell.bytes_sent
            assert cell.seconds is not None and 0 < cell.longest_seconds <= cell.seconds
        assert sent == {
            "all_gather": 6 * row * others,
            "all_to_all": (6 // size * others + sum(rank + o for o in range(size) if o != rank))
            * row,
            "reduce_scatter": 6 // size * row * others,
            "all_reduce": 6 * row * others,
            "sum_disjoint": 6 // size * row * others,
            "gather": 6 * row if rank else 0,
        }
        assert sum(sent.values()) == bytes_sent
        assert sum(cell.calls for cell in found.rows) == len(OPERATIONS) + 1
    document = build([[found] for found, _ in told])
    all_sent = sum(bytes_sent for _, bytes_sent in told)
    rows = [
        operation
        for rank in document["ranks"]
        for group in rank["groups"]
        for operation in group["operations"]
    ]
    assert sum(row["bytes_sent"] for row in rows) == all_sent
    assert all(row["mean_seconds"] * row["calls"] == pytest.approx(row["seconds"]) for row in rows)
    of_rank_0 = totals([told[0][0]])
    assert [total.operation for total in of_rank_0] == sorted(OPERATIONS)
    assert sum(total.bytes_sent for total in of_rank_0) == told[0][1]


def test_documents_say_why_they_are_empty() -> None:
    assert build([[]])["summary"] == ["There is one rank, which has nobody to send to."]
    assert "form no groups" in build([[], []])["summary"][0]


def test_times_of_a_mix_are_not_told() -> None:
    row = CommRow(
        operation="gather", least_bytes=1, calls=1, message_bytes=1, bytes_sent=1, seconds=1.0,
        longest_seconds=1.0,
    )  # fmt: skip
    log = CommLog()
    log.note("gather", 1, 1, 1.0)
    assert log.rows() == [row]
    log.note("gather", 1, 1, None)
    mixed = GroupCommunication(group="lane", backend="nccl", size=2, rows=log.rows())
    (total,) = totals([mixed])
    assert (total.calls, total.seconds) == (2, None)
