"""The links between rank 0 and the others, without processes: each rank is a thread here."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
import zmq

from moe_serve import rank_links
from moe_serve.errors import ConfigError, EngineDeadError, EngineError
from moe_serve.messages import Shutdown
from moe_serve.parallel.degrees import local_seat
from moe_serve.parallel.world import Peer, World
from moe_serve.rank_links import LAST_WORDS_SECONDS, LeaderLink, RankLinks
from moe_serve.rank_messages import RankFailed, RankLoad, RankReady, ReadLoad
from moe_serve.ranked_executor import causes

TIMEOUT = 1.0
Open = Callable[[int], tuple[RankLinks, list[LeaderLink]]]


def world_of(rank: int, num_ranks: int) -> World:
    """Other ranks are elsewhere: a lost one is not killed by its process id."""
    peers = [Peer("127.0.0.1", 1), *(Peer(f"elsewhere-{rank}", 1) for rank in range(1, num_ranks))]
    return World(
        seat=local_seat(rank, num_ranks),
        peers=tuple(peers),
        device=torch.device("cpu"),
        timeout=TIMEOUT,
    )


@pytest.fixture(autouse=True)
def _broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group."""
    values: queue.Queue[Any] = queue.Queue()

    def broadcast(world: World, value: Any) -> Any:
        if world.seat.rank > 0:
            return values.get(timeout=5)
        for _ in range(1, world.seat.world_size):
            values.put(value)
        return value

    monkeypatch.setattr(rank_links, "broadcast", broadcast)


def close(side: RankLinks | LeaderLink) -> None:
    if not side._context.closed:
        side.close()


@pytest.fixture
def open_links() -> Iterator[Open]:
    """open_links(num_ranks) -> rank 0's side, and the side of each other rank."""
    made: list[tuple[RankLinks, list[LeaderLink]]] = []

    def make(num_ranks: int) -> tuple[RankLinks, list[LeaderLink]]:
        others: dict[int, LeaderLink] = {}

        def come(rank: int) -> None:
            others[rank] = LeaderLink(world_of(rank, num_ranks), ends_process=False)

        threads = [threading.Thread(target=come, args=(rank,)) for rank in range(1, num_ranks)]
        for thread in threads:
            thread.start()
        links = RankLinks(world_of(0, num_ranks))
        for thread in threads:
            thread.join(5)
        made.append((links, [others[rank] for rank in range(1, num_ranks)]))
        return made[-1]

    yield make
    for links, others in made:
        # In order: rank 0 first, which waits until the others have hung up.
        closing = threading.Thread(target=close, args=(links,))
        closing.start()
        time.sleep(0.15)
        for other in others:
            close(other)
        closing.join(5)


def listening() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"}


def ports(links: RankLinks) -> list[int]:
    sockets = [links._inbox, *links._outboxes.values()]
    return [int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]) for socket in sockets]


def test_messages_go_both_ways(open_links: Open) -> None:
    links, others = open_links(3)
    links.send_all(ReadLoad())
    for number, other in enumerate(others):
        assert other.receive() == ReadLoad()
        other.send(RankLoad(counts=bytes([number])))
    assert links.receive_all(RankLoad) == [RankLoad(counts=b"\0"), RankLoad(counts=b"\1")]


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(63)])
def test_a_stranger_at_the_port_is_no_lost_rank(open_links: Open, words: bytes) -> None:
    links, others = open_links(2)
    for port in ports(links):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
    assert links.wait_failure(LAST_WORDS_SECONDS + 0.2) is None
    links.send_all(ReadLoad())
    assert others[0].receive() == ReadLoad()


def test_sending_to_a_rank_that_is_gone_fails_at_once(open_links: Open) -> None:
    links, others = open_links(3)
    others[1].close()
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 2 .* ended"):
        while time.monotonic() < began + 5:
            links.send_all(ReadLoad())
    with pytest.raises(EngineDeadError, match="rank 2"):
        links.receive(1, RankReady)
    assert time.monotonic() - began < TIMEOUT


def test_closing_does_not_wait_for_a_rank_that_is_gone(open_links: Open) -> None:
    links, others = open_links(3)
    others[0].close()
    others[1].close()
    began = time.monotonic()
    links.close()
    assert time.monotonic() - began < TIMEOUT


def test_a_rank_is_told_to_end_before_its_link_is_lost(open_links: Open) -> None:
    links, others = open_links(2)
    closing = threading.Thread(target=links.close)
    closing.start()
    assert others[0].receive() == Shutdown()
    # A busy rank takes its time.
    time.sleep(0.4)
    assert not others[0]._is_lost.is_set()
    others[0].close()
    closing.join(1)
    assert not closing.is_alive()


def test_a_rank_that_never_connects_is_missed_and_nothing_stays_behind() -> None:
    before = threading.active_count(), listening()
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 did not connect within 1 s"):
        RankLinks(world_of(0, 3))
    assert time.monotonic() - began < 2 * TIMEOUT
    assert (threading.active_count(), listening()) == before


def test_what_cannot_be_read_is_an_error_and_no_silence(open_links: Open) -> None:
    links, others = open_links(2)
    others[0]._outbox.send(b"one part, where there should be two")
    with pytest.raises(EngineError, match="reading from the ranks failed"):
        links.receive(1, RankReady)


@pytest.mark.parametrize(("is_config", "kind"), [(True, ConfigError), (False, EngineError)])
def test_the_reason_of_a_failed_collective_is_told(
    open_links: Open, is_config: bool, kind: type[Exception]
) -> None:
    links, others = open_links(2)
    with pytest.raises(kind, match="rank 1: too little memory") as caught, causes(links):
        others[0].send(RankFailed(message="too little memory", is_config=is_config))
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value.__cause__) == "Connection closed by peer"
