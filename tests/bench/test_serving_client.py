"""The client against a server in the same process. Nothing here looks at how long it took."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from moe_serve.bench.serving.bodies import Planned
from moe_serve.bench.serving.client import Client
from moe_serve.bench.serving.outcome import Outcome
from moe_serve.bench.serving.runner import Observed, run_load
from tests.bench.fake_server import (
    DONE,
    STREAM_HEAD,
    Answer,
    FakeServer,
    answer,
    chunked,
    event,
    running,
    stream,
    token,
    usage,
)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


def planned(num: int, due: float = 0.0) -> list[Planned]:
    return [Planned(due=due, body=b'{"n": %d}' % n, num_input=5, num_wanted=2) for n in range(num)]


def load(
    url: str, requests: list[Planned], max_concurrency: int | None = None, **options: Any
) -> Observed:
    async def run() -> Observed:
        async with Client(url, "/v1/completions", **options) as client:
            return await run_load(client, requests, max_concurrency)

    return asyncio.run(run())


def one(server: FakeServer, name: str, pieces: Answer, **options: Any) -> Outcome:
    server.answers[name] = lambda path, body: pieces
    (outcome,) = load(server.url(name), planned(1), **options).outcomes
    return outcome


def test_a_stream_with_usage(server: FakeServer) -> None:
    outcome = one(server, "a", stream(token("a"), token("b", "stop"), usage(9, 2), DONE))
    assert (outcome.error, outcome.num_input, outcome.num_output) == (None, 9, 2)
    assert 0 <= outcome.sent <= outcome.sent + outcome.ttft <= outcome.ended
    assert outcome.tpot == outcome.itl[0] == pytest.approx(outcome.e2el - outcome.ttft)


def test_a_stream_without_usage(server: FakeServer) -> None:
    outcome = one(server, "a", stream(token("a"), token("b"), token("c", "length"), DONE))
    assert (outcome.error, outcome.num_input, outcome.num_output) == (None, 5, 3)


def test_several_tokens_in_a_chunk(server: FakeServer) -> None:
    outcome = one(server, "a", stream(token("abc"), token("def"), usage(9, 6), DONE))
    assert (outcome.num_output, outcome.num_chunks, len(outcome.itl)) == (6, 2, 1)
    assert outcome.tpot == pytest.approx((outcome.e2el - outcome.ttft) / 5)


def test_a_letter_that_is_split_over_packets(server: FakeServer) -> None:
    data = token("größer 🎈", "stop")
    assert "🎈".encode() in data
    pieces = [STREAM_HEAD, b"%x\r\n" % len(data), *(bytes([byte]) for byte in data),
              b"\r\n", chunked(DONE), b"0\r\n\r\n"]  # fmt: skip
    outcome = one(server, "a", pieces)
    assert (outcome.error, outcome.num_output) == (None, 1)


def test_a_stream_that_ends_with_the_connection(server: FakeServer) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    outcome = one(server, "a", [head, token("a"), token("b"), DONE, None])
    assert (outcome.error, outcome.num_output) == (None, 2)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        (stream(token("a"), event({"error": {"message": "broken"}})), "broken"),
        (answer("429 Too Many Requests", {"error": {"message": "queue full"}}), "429: queue full"),
        ([STREAM_HEAD, chunked(token("a")), None], "the connection was closed before the end"),
        ([None], "the connection was closed before the end"),
        ([b"oh no, this is no HTTP\r\n\r\n"], "the answer begins with 'oh no,"),
    ],
)
def test_what_goes_wrong_is_told(server: FakeServer, pieces: Answer, error: str) -> None:
    outcome = one(server, "a", pieces)
    assert outcome.error is not None and outcome.error.startswith(error)


def test_no_answer_in_time(server: FakeServer) -> None:
    assert one(server, "a", [], timeout=0.02).error == "no end of the answer within 0.02 s"


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        (outcome,) = load(url, planned(1)).outcomes
    assert outcome.error is not None and "onnect" in outcome.error


def test_connections_are_used_again(server: FakeServer) -> None:
    server.answers["a"] = lambda path, body: stream(token("a", "stop"), DONE)
    before = server.num_connections
    observed = load(server.url("a"), planned(7), max_concurrency=2)
    assert [each.error for each in observed.outcomes] == [None] * 7
    assert server.num_connections - before == 2


def test_a_connection_that_was_closed_meanwhile_is_replaced(server: FakeServer) -> None:
    good = stream(token("a", "stop"), DONE)
    answers = iter([good, [None], good, good])
    server.answers["a"] = lambda path, body: next(answers)
    observed = load(server.url("a"), planned(3), max_concurrency=1)
    assert [each.error for each in observed.outcomes] == [None] * 3


def test_the_key_and_the_path_are_sent(server: FakeServer) -> None:
    server.asked.clear()
    one(server, "x", stream(token("a", "stop"), DONE), api_key="k")
    assert server.asked == [("x", "v1/completions", {"n": 0})]
    assert "Authorization: Bearer k" in Client("http://a", "/b", api_key="k").head.decode()


class Stepped:
    """A client with a clock of its own: a request of body N takes N seconds."""

    def __init__(self) -> None:
        self.time = 0.0
        self.log: list[tuple[str, int]] = []

    def begin(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def send(self, planned: Planned) -> Outcome:
        number, sent = int(planned.body), self.time
        self.log.append(("start", number))
        for _ in range(number):
            await asyncio.sleep(0)
        self.log.append(("end", number))
        self.time += 1
        return Outcome(due=planned.due, sent=sent, ended=self.time, error="none")


def stepped(numbers: list[int], max_concurrency: int | None) -> list[tuple[str, int]]:
    client: Any = Stepped()
    requests = [
        Planned(due=0.0, body=b"%d" % number, num_input=1, num_wanted=1) for number in numbers
    ]
    observed = asyncio.run(run_load(client, requests, max_concurrency))
    assert len(observed.outcomes) == len(numbers)
    return client.log


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_a_closed_loop_is_always_full_and_never_over(limit: int | None) -> None:
    numbers = [5, 1, 2, 9, 3, 1, 4]
    log = stepped(numbers, limit)
    assert [number for what, number in log if what == "start"] == numbers
    under_way = 0
    for index, (what, _) in enumerate(log):
        under_way += 1 if what == "start" else -1
        assert under_way <= (limit or len(numbers))
        num_started = sum(what == "start" for what, _ in log[: index + 1])
        if what == "start" and num_started < len(numbers) and log[index + 1][0] == "end":
            assert under_way == limit


def test_no_request_at_all() -> None:
    assert stepped([], None) == []


def test_a_request_waits_until_it_is_due(server: FakeServer) -> None:
    server.answers["a"] = lambda path, body: stream(token("a", "stop"), DONE)
    requests = [*planned(1), *planned(2, due=0.02)]
    observed = load(server.url("a"), requests)
    assert all(each.sent >= each.due for each in observed.outcomes)
    assert sorted(each.due for each in observed.outcomes) == [0.0, 0.02, 0.02]
    assert observed.duration >= max(each.ended for each in observed.outcomes)
