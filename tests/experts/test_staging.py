"""Ranks that move experts, as threads of the test; one as a process that is killed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
import zmq
from hypothesis import given, settings
from torch import multiprocessing

from moe_serve.experts.moving import expert_fetch, expert_peer, expert_server, pieces
from moe_serve.experts.moving.expert_fetch import StagingState
from moe_serve.experts.moving.expert_server import ExpertServer
from moe_serve.experts.moving.migration import ExpertCopy, plan_copies
from moe_serve.experts.moving.pieces import PieceHeader
from moe_serve.experts.moving.staging import ExpertStaging
from moe_serve.experts.placement import LayerPlacement, Placement
from tests.experts.moves import (
    LOOPBACK,
    SOON,
    check_banks,
    make_banks,
    moves,
    random_weights,
    stage,
    wait_done,
    wait_error,
    wait_until,
)


@pytest.fixture(autouse=True, scope="module")
def _small_pieces_and_short_naps() -> Iterator[None]:
    """An expert is of several pieces, and closing does not take the naps of a server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 48)
        patch.setattr(expert_server, "_POLL_MS", 5)
        patch.setattr(expert_fetch, "_POLL_MS", 5)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = threading.enumerate(), open_ports()
    yield
    wait_until(lambda: (threading.enumerate(), open_ports()) == before)


def open_ports() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"}


def place(*layers: tuple[tuple[int, ...], ...]) -> Placement:
    return Placement(tuple(LayerPlacement(layer) for layer in layers))


class Ranks:
    """All ranks of a placement, with random weights."""

    def __init__(self, placement: Placement, dtype: torch.dtype = torch.float32) -> None:
        self.placement = placement
        self.weights = random_weights(placement, dtype, hidden=5, inner=3)
        self.banks = [
            make_banks(placement, rank, self.weights, dtype) for rank in range(placement.num_ranks)
        ]
        self.stagings = [
            ExpertStaging(banks, rank, LOOPBACK) for rank, banks in enumerate(self.banks)
        ]
        for staging in self.stagings:
            staging.connect([other.address for other in self.stagings])

    def check(self, placement: Placement) -> None:
        for rank, banks in enumerate(self.banks):
            check_banks(banks, placement, rank, self.weights)

    def apply(self) -> None:
        for staging in self.stagings:
            staging.apply()

    def close(self) -> None:
        for staging in self.stagings:
            staging.close()


@contextlib.contextmanager
def ranks_of(placement: Placement, dtype: torch.dtype = torch.float32) -> Iterator[Ranks]:
    ranks = Ranks(placement, dtype)
    try:
        yield ranks
    finally:
        ranks.close()


# Two ranks, two layers; in the first they swap an expert, and rank 1 moves one by itself.
OLD = place(((0, 1), (2, 3, 4)), ((0, 1), (2, 3, 4)))
NEW = place(((2, 1), (0, 4, 3)), ((0, 1), (2, 3, 4)))


@pytest.fixture
def two() -> Iterator[Ranks]:
    with ranks_of(OLD) as ranks:
        yield ranks


@settings(max_examples=25, deadline=None)
@given(moves())
def test_each_slot_gets_the_weights_of_its_new_expert(move: tuple[Placement, Placement]) -> None:
    old, new = move
    dtype = torch.bfloat16 if old.num_slots % 2 else torch.float32
    with ranks_of(old, dtype) as ranks:
        stage(ranks.stagings, plan_copies(old, new))
        ranks.check(old)
        ranks.apply()
        ranks.check(new)


def test_what_came_from_other_ranks_is_counted(two: Ranks) -> None:
    stage(two.stagings, plan_copies(OLD, NEW))
    expert_bytes = 4 * 3 * 5 * 3
    # Rank 1 also copies two of its own.
    assert [staging.state() for staging in two.stagings] == [
        StagingState(True, expert_bytes),
        StagingState(True, expert_bytes),
    ]


def test_experts_move_there_and_back_and_there(two: Ranks) -> None:
    for before, after in ((OLD, NEW), (NEW, OLD), (OLD, NEW)):
        stage(two.stagings, plan_copies(before, after))
        two.apply()
        two.check(after)


def test_who_has_switched_waits_for_those_who_have_not(two: Ranks) -> None:
    """Else it would get what lay in the slot before, unharmed and wrong."""
    first, second = two.stagings
    there, back = plan_copies(OLD, NEW), plan_copies(NEW, OLD)
    stage(two.stagings, there)
    first.apply()
    first.start(back[0], SOON)
    time.sleep(0.05)
    assert first.state() == StagingState()
    second.apply()
    second.start(back[1], SOON)
    for staging in two.stagings:
        wait_done(staging)
    two.apply()
    two.check(OLD)


def test_who_has_not_switched_gets_nothing_from_those_who_have(two: Ranks) -> None:
    first, second = two.stagings
    stage(two.stagings, plan_copies(OLD, NEW))
    first.apply()
    second.drop()
    second.start([ExpertCopy(0, 0, 0, 0)], SOON)
    assert wait_error(second) == (
        "layer 0, slot 0: no expert from slot 0 of rank 0: its experts have moved on"
    )


def test_weights_that_change_while_they_are_read_are_not_given(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.stagings
    read = expert_server.host_bytes

    def read_late(tensor: torch.Tensor) -> object:
        data = read(tensor)
        with first._server.switching():
            return data.copy()

    monkeypatch.setattr(expert_server, "host_bytes", read_late)
    second.start([ExpertCopy(0, 0, 0, 0)], SOON)
    assert wait_error(second).endswith("its experts have moved on")


def test_a_switch_that_fails_half_way_gives_nothing_to_others(two: Ranks) -> None:
    first, second = two.stagings
    with pytest.raises(RuntimeError), first._server.switching():
        raise RuntimeError("out of memory")
    second.start([ExpertCopy(0, 0, 0, 0)], SOON)
    assert wait_error(second).endswith("its experts have moved on")


def test_dropping_leaves_all_as_it_was(two: Ranks) -> None:
    copies = plan_copies(OLD, NEW)
    stage(two.stagings, copies)
    for staging in two.stagings:
        staging.drop()
        staging.drop()
        assert staging.state() == StagingState()
    two.check(OLD)
    stage(two.stagings, copies)


def test_only_what_is_done_can_be_applied(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two.stagings
    with pytest.raises(AssertionError):
        first.apply()
    monkeypatch.setattr(ExpertServer, "_send", lambda *args: None)
    first.start(plan_copies(OLD, NEW)[0], SOON)
    with pytest.raises(AssertionError):
        first.apply()
    with pytest.raises(AssertionError, match="neither applied nor dropped"):
        first.start([], SOON)
    two.check(OLD)


@pytest.mark.parametrize(
    "copies",
    [
        [ExpertCopy(0, 2, 1, 0)],
        [ExpertCopy(2, 0, 1, 0)],
        [ExpertCopy(0, 0, 1, 0), ExpertCopy(0, 0, 1, 1)],
    ],
)
def test_what_no_planner_gives_is_a_fault_of_ours(two: Ranks, copies: Sequence[ExpertCopy]) -> None:
    with pytest.raises((AssertionError, IndexError)):
        two.stagings[0].start(copies, SOON)


def test_replicas_have_equal_checksums_and_others_have_not() -> None:
    old = place(((0, 1), (1, 0)), ((0, 1), (0, 1)))
    with ranks_of(old) as ranks:
        first, second = (staging.checksums() for staging in ranks.stagings)
        assert first[0] == second[0][::-1]
        assert first[1] == second[1]
        assert len({number for layer in first for number in layer}) == 4
        # The lowest bit of one weight.
        ranks.banks[0][1].down_EDF.view(torch.int32)[1, 4, 2] ^= 1
        changed = ranks.stagings[0].checksums()
        assert changed[0] == first[0]
        assert changed[1][0] == first[1][0]
        assert changed[1][1] != first[1][1]


def test_a_rank_without_slots_takes_part() -> None:
    old, new = place(((), (0, 1))), place(((), (1, 0)))
    with ranks_of(old) as ranks:
        stage(ranks.stagings, plan_copies(old, new))
        ranks.apply()
        ranks.check(new)
        assert ranks.stagings[0].checksums() == [[]]


Send = Callable[[ExpertServer, bytes, PieceHeader, zmq.Frame], None]


def break_sends(monkeypatch: pytest.MonkeyPatch, after: int, send: Send) -> None:
    """From that answer on, of any server."""
    real, count = ExpertServer._send, iter(range(1_000_000))

    def broken(self: ExpertServer, peer: bytes, header: PieceHeader, body: zmq.Frame) -> None:
        if next(count) < after:
            real(self, peer, header, body)
        else:
            send(self, peer, header, body)

    monkeypatch.setattr(ExpertServer, "_send", broken)


@pytest.mark.parametrize("after", [0, 3])
def test_one_wrong_bit_is_noticed(two: Ranks, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    real = ExpertServer._send

    def flip(server: ExpertServer, peer: bytes, header: PieceHeader, body: zmq.Frame) -> None:
        data = bytearray(body.bytes)
        data[len(data) // 2] ^= 4
        real(server, peer, header, zmq.Frame(bytes(data)))

    break_sends(monkeypatch, after, flip)
    two.stagings[0].start([ExpertCopy(0, 1, 1, 2)], SOON)
    assert wait_error(two.stagings[0]) == (
        "layer 0, slot 1: no expert from slot 2 of rank 1: bytes changed on the way: their "
        "checksum differs"
    )
    monkeypatch.undo()
    two.stagings[0].drop()
    two.check(OLD)


def test_a_rank_that_falls_silent_is_an_error_in_time_and_the_next_try_can_work(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = two.stagings
    with monkeypatch.context() as patch:
        break_sends(patch, 2, lambda *args: None)
        first.start([ExpertCopy(1, 1, 1, 2)], 0.6)
        assert wait_error(first) == (
            "layer 1, slot 1: no expert from slot 2 of rank 1: not all was there within 0.6 s"
        )
        assert 0 < first.state().num_bytes < 180
        first.drop()
    stage(two.stagings, plan_copies(OLD, NEW))
    two.apply()
    two.check(NEW)


def test_no_more_is_asked_for_than_a_server_keeps(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server drops answers beyond its limit for one rank, and they would never come."""
    answers: list[object] = []
    break_sends(monkeypatch, 0, lambda *args: answers.append(args))
    first, _ = two.stagings
    first.start([ExpertCopy(0, 0, 1, 0), ExpertCopy(0, 1, 1, 1)], 0.2)
    # Of 10 pieces.
    assert "not all was there" in wait_error(first)
    assert len(answers) == expert_peer._WINDOW < expert_server._MAX_ANSWERS


def test_dropping_half_way_is_prompt_and_late_answers_do_no_harm(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.stagings
    real = ExpertServer._send
    held = []
    with monkeypatch.context() as patch:
        break_sends(patch, 1, lambda *answer: held.append(answer))
        first.start([ExpertCopy(0, 0, 1, 0)], 300)
        wait_until(lambda: len(held) > 2)
        began = time.monotonic()
        first.drop()
        assert time.monotonic() - began < SOON / 4

    def send_late_ones_first(*answer: object) -> None:
        while held:
            real(*held.pop())
        real(*answer)  # type: ignore[arg-type]

    # From the server's own thread: a socket is for one.
    monkeypatch.setattr(ExpertServer, "_send", send_late_ones_first)
    stage(two.stagings, plan_copies(OLD, NEW))
    assert held == []
    two.apply()
    two.check(NEW)


def test_a_rank_that_closes_half_way_is_an_error_in_time(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.stagings
    break_sends(monkeypatch, 1, lambda *args: None)
    first.start([ExpertCopy(0, 0, 1, 0)], 1.0)
    wait_until(lambda: first.state().num_bytes > 0)
    second.close()
    assert "of rank 1: not all was there within 1 s" in wait_error(first)


def test_closing_half_way_is_prompt(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertServer, "_send", lambda *args: None)
    two.stagings[0].start([ExpertCopy(0, 0, 1, 0)], 300)
    began = time.monotonic()
    two.close()
    assert time.monotonic() - began < SOON / 2


def test_a_fault_while_reading_reaches_the_one_who_asked(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(expert_server, "host_bytes", fail)
        two.stagings[0].start([ExpertCopy(0, 0, 1, 0)], SOON)
        assert "reading it failed: RuntimeError('the device is lost')" in wait_error(
            two.stagings[0]
        )
    two.stagings[0].drop()
    stage(two.stagings, plan_copies(OLD, NEW))


def test_a_fault_of_the_fetch_is_told(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(expert_fetch, "_empty_like", fail)
    two.stagings[0].start([ExpertCopy(0, 0, 1, 0)], SOON)
    assert wait_error(two.stagings[0]) == "fetching experts failed: RuntimeError('no memory')"


def test_a_fault_of_the_server_is_told_by_its_own_rank(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no socket")

    monkeypatch.setattr(ExpertServer, "_send", fail)
    two.stagings[0].start([ExpertCopy(0, 0, 1, 0)], 0.5)
    assert "no socket" in wait_error(two.stagings[1])
    assert "not all was there" in wait_error(two.stagings[0])


def test_ranks_with_experts_of_other_shapes_are_told_apart() -> None:
    placement = place(((0,), (1,)))
    sizes = ((torch.float32, 5, 3), (torch.bfloat16, 5, 6))
    stagings = []
    for rank, (dtype, hidden, inner) in enumerate(sizes):
        weights = random_weights(placement, dtype, hidden, inner)
        banks = make_banks(placement, rank, weights, dtype, hidden, inner)
        stagings.append(ExpertStaging(banks, rank, LOOPBACK))
    for staging in stagings:
        staging.connect([other.address for other in stagings])
    stagings[0].start([ExpertCopy(0, 0, 1, 0)], SOON)
    assert wait_error(stagings[0]).endswith(
        "its experts are bfloat16 [12, 5], [5, 6], those of this rank float32 [6, 5], [5, 3]"
    )
    for staging in stagings:
        staging.close()


def test_an_address_that_is_not_of_this_host_leaves_nothing_behind() -> None:
    with pytest.raises(zmq.ZMQError):
        ExpertStaging([], 0, "192.0.2.1")


@pytest.mark.dist
def test_a_process_that_is_killed_half_way_is_an_error_in_time() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=give_two_pieces, args=(there,), daemon=True
    )
    process.start()
    weights = random_weights(OLD, torch.float32, hidden=5, inner=3)
    banks = make_banks(OLD, 0, weights)
    staging = ExpertStaging(banks, 0, LOOPBACK)
    try:
        assert here.poll(60)
        staging.connect([staging.address, here.recv()])
        staging.start([ExpertCopy(0, 0, 1, 0)], 1.5)
        wait_until(lambda: staging.state().num_bytes == 2 * 48)
        process.kill()
        process.join(SOON)
        assert "of rank 1: not all was there within 1.5 s" in wait_error(staging)
        staging.drop()
        check_banks(banks, OLD, 0, weights)
        staging.start([ExpertCopy(0, 0, 0, 1)], SOON)
        wait_done(staging)
    finally:
        process.kill()
        process.join(SOON)
        staging.close()
        here.close()
        there.close()


def give_two_pieces(pipe: Connection) -> None:
    """Rank 1, as a process, which then gives nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 48)
        break_sends(patch, 2, lambda *args: None)
        banks = make_banks(OLD, 1, random_weights(OLD, torch.float32, hidden=5, inner=3))
        staging = ExpertStaging(banks, 1, LOOPBACK)
        pipe.send(staging.address)
        time.sleep(SOON * 3)
        staging.close()
