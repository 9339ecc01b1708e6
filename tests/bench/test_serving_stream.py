"""Bytes with stamps in, times out: no clock is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.bench.serving.bodies import Planned
from moe_serve.bench.serving.event_parser import EventParser
from moe_serve.bench.serving.outcome import Exchange, Outcome
from moe_serve.bench.serving.response_parser import ResponseParser
from moe_serve.bench.serving.token_stream import TokenStream
from tests.bench.fake_server import (
    DONE,
    STREAM_HEAD,
    answer,
    chunked,
    delta,
    event,
    stream,
    token,
    usage,
)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]


CUTS = st.lists(st.integers(0, 10**6), max_size=40)
SIZED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\nX-A: b:c\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTRANSFER-ENCODING: Chunked\r\n\r\n"
    b"3;ext=1\r\nhel\r\n02\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nhello"


@given(data=st.sampled_from([SIZED, CHUNKED, UNTIL_CLOSE]), cuts=CUTS)
def test_a_response_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    parser = ResponseParser()
    body = b"".join(part for piece in pieces_of(data, cuts) for part in parser.feed(piece))
    assert body == b"hello"
    if data is UNTIL_CLOSE:
        assert not parser.is_complete
        parser.end()
    assert parser.is_complete
    assert parser.status == (429 if data is SIZED else 200)
    assert parser.keeps_alive == (data is not UNTIL_CLOSE)
    assert data is not SIZED or parser.headers["x-a"] == "b:c"


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70000,
    ],
)
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        ResponseParser().feed(data)


@pytest.mark.parametrize("length", [0, 10, len(SIZED) - 1, len(CHUNKED) - 1])
def test_an_answer_that_is_cut_off_is_an_error(length: int) -> None:
    parser = ResponseParser()
    parser.feed((CHUNKED if length >= len(SIZED) else SIZED)[:length])
    with pytest.raises(ValueError, match="closed before the end"):
        parser.end()


def test_an_empty_answer_is_complete() -> None:
    for head in (
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ):
        parser = ResponseParser()
        assert parser.feed(head) == [] and parser.is_complete


@given(cuts=CUTS)
def test_events_in_any_pieces(cuts: list[int]) -> None:
    data = (
        ": ping\r\n\r\ndata: größer 🎈\r\n\r\nevent: x\ndata:b\n\nid: 3\ndata: [DONE]\n\n".encode()
    )
    parser = EventParser()
    events = [each for piece in pieces_of(data, cuts) for each in parser.feed(piece)]
    assert [each.decode() for each in events] == ["größer 🎈", "b", "[DONE]"]


def fed(*stamped: tuple[float, bytes]) -> TokenStream:
    tokens = TokenStream()
    for now, data in stamped:
        for payload in EventParser().feed(data):
            tokens.feed(payload, now)
    return tokens


def test_one_token_a_chunk() -> None:
    tokens = fed((1, token("a")), (3, token("")), (4, token("b", "length")), (5, usage(7, 3)))
    assert list(tokens.stamps) == [1, 3, 4]
    assert tokens.inter_token_latencies() == [2, 1]
    assert (tokens.num_input, tokens.num_output, tokens.is_finished) == (7, 3, True)


def test_without_usage_a_chunk_is_a_token() -> None:
    tokens = fed((1, token("a")), (2, token("b")), (3, token("", "stop")), (3, DONE))
    assert (tokens.num_input, tokens.num_output) == (None, 2)


def test_a_chat_begins_with_a_role_and_ends_with_a_reason_not_with_tokens() -> None:
    tokens = fed((1, delta(role="assistant", content="")), (2, delta(content="a")),
                 (3, delta(reasoning_content="b")), (4, delta(content="")),
                 (5, delta(tool_calls=[{"index": 0}])), (6, delta("stop")))  # fmt: skip
    assert list(tokens.stamps) == [2, 3, 4, 5]
    assert tokens.is_finished


def told(text: str, total: int) -> bytes:
    return token(text, usage={"prompt_tokens": 2, "completion_tokens": total})


def test_a_gap_is_divided_over_the_tokens_that_the_chunk_tells() -> None:
    tokens = fed((0, told("a", 1)), (6, told("bcd", 4)), (8, told("e", 5)))
    assert tokens.inter_token_latencies() == [2, 2, 2, 2]
    assert tokens.num_output == 5
    many = {"text": "ab", "token_ids": [4, 5]}
    tokens = fed((0, event({"choices": [many]})), (3, event({"choices": [many]})))
    assert tokens.inter_token_latencies() == [1.5, 1.5]


def test_a_gap_is_divided_evenly_where_only_the_sum_is_told() -> None:
    tokens = fed((0, token("ab")), (6, token("cd")), (8, token("ef")), (8, usage(1, 6)))
    assert tokens.inter_token_latencies() == [3, 1]


def test_a_token_without_a_chunk_does_not_divide_gaps() -> None:
    stamped = [(float(n), token("a")) for n in range(40)]
    assert fed(*stamped, (40.0, usage(1, 41))).inter_token_latencies() == [1.0] * 39


def test_no_gap_without_two_chunks() -> None:
    assert fed().inter_token_latencies() == []
    assert fed((5, told("a", 7))).inter_token_latencies() == []


def exchange(*stamped: tuple[float, bytes]) -> Exchange:
    under_way = Exchange()
    for now, data in stamped:
        under_way.receive(data, now)
    return under_way


def outcome(under_way: Exchange) -> Outcome:
    planned = Planned(due=0.5, body=b"", num_input=11, num_wanted=4)
    return under_way.outcome(planned, sent=1.0, ended=99.0)


def test_times_are_from_sending_to_tokens() -> None:
    result = outcome(
        exchange(
            (1.5, STREAM_HEAD), (2.0, chunked(token("a"))), (4.0, chunked(token("b"))),
            (4.5, chunked(token("c", "length"))), (5.0, chunked(usage(7, 3))),
            (6.0, chunked(DONE) + b"0\r\n\r\n"),
        )
    )  # fmt: skip
    assert result == Outcome(
        due=0.5, sent=1.0, ended=99.0, num_input=7, num_output=3, num_wanted=4, num_chunks=3,
        ttft=1.0, e2el=3.5, tpot=1.25, itl=(2.0, 0.5),
    )  # fmt: skip


@given(cuts=CUTS)
def test_pieces_do_not_change_what_is_read(cuts: list[int]) -> None:
    data = b"".join(each or b"" for each in stream(token("größer"), token("🎈", "stop"), DONE))
    under_way = exchange(*((1.0 + n, piece) for n, piece in enumerate(pieces_of(data, cuts))))
    result = outcome(under_way)
    assert under_way.response.keeps_alive
    assert (result.error, result.num_output, result.num_input) == (None, 2, 11)


def test_one_token_has_no_time_per_token() -> None:
    result = outcome(exchange((2.0, b"".join(map(bytes, stream(token("a", "stop")))))))
    assert (result.tpot, result.itl, result.ttft, result.e2el) == (None, (), 1.0, 1.0)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        (stream(token("a"), event({"error": {"message": "out\nof memory", "code": 500}})),
         "out of memory"),
        (stream(token("a"), event({"error": "gone"}), DONE), "gone"),
        (stream(token("a"), event({"object": "error", "message": "bad"}), DONE), "bad"),
        (stream(DONE), "the answer has no token"),
        (stream(token("a")), "the stream ended without [DONE]"),
        (stream(event("{oops")), "an event that is no chunk of the API"),
        (stream(event("[1]")), "an event that is no chunk of the API"),
        (answer("200 OK", {"choices": []}), "the answer is no event stream"),
        (answer("429 Too Many Requests", {"error": {"message": "queue full"}}), "429: queue full"),
        (answer("404 Not Found", {"detail": "Not Found"}), "404: {'detail': 'Not Found'}"),
        ([b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noh\xff\n"], "502: oh\ufffd"),
        ([b"HTTP/1.1 500 Bad\r\nContent-Length: 0\r\n\r\n"], "500: no text"),
    ],
)  # fmt: skip
def test_why_an_answer_is_none(pieces: list[Any], error: str) -> None:
    result = outcome(exchange(*((2.0, piece) for piece in pieces)))
    assert result.error is not None and result.error.startswith(error)
    assert (result.num_output, result.sent, result.ended) == (0, 1.0, 99.0)


def test_a_long_error_is_cut() -> None:
    pieces = answer("400 Bad Request", {"error": {"message": "x" * 5000}})
    result = outcome(exchange((2.0, pieces[0] or b"")))
    assert result.error == "400: " + "x" * 200


def test_unknown_fields_are_no_error() -> None:
    value = {"id": "1", "choices": [{"text": "a", "logprobs": None, "stop_reason": 2}], "x": [1]}
    assert fed((1, f"data: {json.dumps(value)}\n".encode())).error is None
