"""Messages between the one who gives experts and the one who gets them, when either is broken."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from moe_serve.experts.moving import expert_fetch, expert_server
from moe_serve.experts.moving.checksum import checksum
from moe_serve.experts.moving.expert_fetch import ExpertFetch, ExpertSources
from moe_serve.experts.moving.expert_server import ExpertServer
from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.experts.moving.pieces import (
    PIECE_BYTES,
    PieceHeader,
    PieceRequest,
    decode_header,
    decode_request,
    encode,
    ranges,
)
from moe_serve.experts.moving.weights import expert_kind, expert_weights, host_bytes
from moe_serve.experts.placement import LayerPlacement, Placement
from tests.experts.moves import LOOPBACK, SOON, make_banks, random_weights, wait_until

PLACEMENT = Placement((LayerPlacement(((0, 1, 2),)),) * 2)
WEIGHTS = random_weights(PLACEMENT, torch.float32, hidden=5, inner=3)
BANKS = make_banks(PLACEMENT, 0, WEIGHTS)
KIND = expert_kind(BANKS[0])
# Of an expert's first matrix: [6, 5] in fp32.
SIZE = 120


@pytest.fixture(autouse=True, scope="module")
def _short_naps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_server, "_POLL_MS", 5)
        patch.setattr(expert_fetch, "_POLL_MS", 5)
        yield


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_the_checksum_is_the_common_crc_32() -> None:
    """Its well-known test value is that of the digits 1 to 9."""
    digits = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    assert checksum(digits) == 0xCBF43926
    assert checksum(digits[:4], digits[4:]) == 0xCBF43926
    assert checksum() == checksum(torch.empty(0, 7)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_each_bit_counts(dtype: torch.dtype) -> None:
    weights = torch.randn(3, 7).to(dtype)
    sums = {checksum(weights)}
    for byte, bit in itertools.product((0, 10, -1), range(8)):
        changed = weights.clone()
        changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
        sums.add(checksum(changed))
    assert len(sums) == 25
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1])
def test_pieces_cover_an_expert(size: int) -> None:
    pieces = list(ranges(size))
    assert [start for start, _ in pieces] == list(range(0, size, PIECE_BYTES))
    assert sum(stop - start for start, stop in pieces) == size
    assert all(0 < stop - start <= PIECE_BYTES for start, stop in pieces)


# One who gives, and a broken one who gets.


class Asker:
    """A socket of the test's own that is connected to a server."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: ExpertServer) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(server.address)

    def ask(self, **changes: int) -> list[bytes]:
        usual = PieceRequest(number=7, version=0, layer=1, slot=2, matrix=0, start=0, stop=SIZE)
        self.socket.send(encode(dataclasses.replace(usual, **changes)))
        assert self.socket.poll(int(SOON * 1000))
        return self.socket.recv_multipart()


@pytest.fixture
def server(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[ExpertServer]:
    server = ExpertServer(BANKS, context, LOOPBACK)
    yield server
    assert server.error is None
    assert server.close()


@pytest.fixture
def asker(context: zmq.Context[zmq.Socket[bytes]], server: ExpertServer) -> Asker:
    return Asker(context, server)


def test_a_server_gives_the_bytes_that_are_asked_for(asker: Asker) -> None:
    gate_up, down = expert_weights(BANKS[1], 2)
    header, body = asker.ask()
    assert body == host_bytes(gate_up).tobytes()
    assert decode_header(header) == PieceHeader(number=7, kind=KIND, checksum=checksum(gate_up))
    header, body = asker.ask(matrix=1, start=9, stop=31)
    assert body == host_bytes(down).tobytes()[9:31]


@pytest.mark.parametrize(
    "changes", [{"layer": 2}, {"layer": -1}, {"slot": 3}, {"slot": -1}, {"matrix": 2}]
)
def test_a_server_says_what_it_does_not_have(asker: Asker, changes: dict[str, int]) -> None:
    header, body = asker.ask(**changes)
    assert decode_header(header).error
    assert decode_header(header).number == 7
    assert body == b""
    assert asker.ask()[1] != b""


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x80"],
        [bytes(500)],
        [b"", b"", b""],
        [encode(PieceHeader(number=0))],
        [encode(PieceHeader(number=0)), b"more"],
    ],
)
def test_a_server_survives_those_who_ask_for_nonsense(asker: Asker, frames: list[bytes]) -> None:
    asker.socket.send_multipart(frames)
    header, _ = asker.ask()
    assert decode_header(header).error is None


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(63)])
def test_a_server_survives_strangers_at_its_port(
    server: ExpertServer, asker: Asker, words: bytes
) -> None:
    port = int(server.address.rpartition(":")[2])
    with socket.create_connection((LOOPBACK, port)) as stranger:
        stranger.sendall(words)
    assert decode_header(asker.ask()[0]).error is None


def test_a_server_hangs_up_on_who_sends_too_much(
    context: zmq.Context[zmq.Socket[bytes]], server: ExpertServer, asker: Asker
) -> None:
    greedy = Asker(context, server)
    hung_up = greedy.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    greedy.socket.send(bytes(100_000))
    assert hung_up.poll(int(SOON * 1000))
    assert decode_header(asker.ask()[0]).error is None
    greedy.socket.disable_monitor()
    hung_up.close()
    greedy.socket.close(linger=0)


def test_who_is_gone_holds_nobody_up(
    context: zmq.Context[zmq.Socket[bytes]], server: ExpertServer, asker: Asker
) -> None:
    gone = Asker(context, server)
    for number in range(200):
        request = PieceRequest(
            number=number, version=2, layer=0, slot=0, matrix=0, start=0, stop=SIZE
        )
        gone.socket.send(encode(request))
    gone.socket.close(linger=0)
    assert decode_header(asker.ask()[0]).error is None
    with server.switching():
        pass
    assert decode_header(asker.ask(version=2)[0]).error is None
    assert decode_header(asker.ask(version=0)[0]).error == "its experts have moved on"


# One who gets, and a broken one who gives.

Answer = Callable[[PieceRequest], list[bytes]]


def right(request: PieceRequest, **changes: object) -> list[bytes]:
    """What a rank answers, as if all its weights were 1."""
    body = bytes([1] * (request.stop - request.start))
    header = PieceHeader(number=request.number, kind=KIND, checksum=zlib.crc32(body))
    return [encode(dataclasses.replace(header, **changes)), body]  # type: ignore[arg-type]


class Giver:
    """Answers in a thread as a test says, whatever that is."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], answer: Answer) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://{LOOPBACK}:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._answer = answer
        self._is_closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing:
            if self._socket.poll(5):
                peer, data = self._socket.recv_multipart()
                self._socket.send_multipart([peer, *self._answer(decode_request(data))])
        self._socket.close(linger=0)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()


Fetch = Callable[..., ExpertFetch]


@pytest.fixture
def fetch_from(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Fetch]:
    """A fetch of one expert from rank 1, which answers so; waits until the fetch has an end."""
    made: list[Giver] = []

    def fetch(answer: Answer, timeout: float = SOON) -> ExpertFetch:
        giver = Giver(context, answer)
        made.append(giver)
        sources = ExpertSources(
            rank=0,
            banks=BANKS,
            addresses=["", giver.address],
            context=context,
            numbers=itertools.count(40),
        )
        fetch = ExpertFetch(sources, [ExpertCopy(1, 0, 1, 2)], version=0, timeout=timeout)
        wait_until(lambda: fetch.state().is_done or fetch.state().error is not None)
        assert fetch.stop()
        return fetch

    yield fetch
    for giver in made:
        giver.close()


def test_right_answers_are_taken(fetch_from: Fetch) -> None:
    fetch = fetch_from(right)
    assert fetch.state() == (True, SIZE + 60, None)
    ((copy, matrices),) = fetch.staged.items()
    assert copy == ExpertCopy(1, 0, 1, 2)
    assert [matrix.shape for matrix in matrices] == [(6, 5), (5, 3)]
    assert all((host_bytes(matrix) == 1).all() for matrix in matrices)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda r: [b"\xc1", b""], "nobody asked for"),
        (lambda r: [b"", b""], "nobody asked for"),
        (lambda r: [encode(r), b""], "its experts are "),
        (lambda r: right(r)[:1], "nobody asked for"),
        (lambda r: [*right(r), b""], "nobody asked for"),
        (lambda r: right(r, number=39), "nobody asked for"),
        (lambda r: right(r, number="40"), "nobody asked for"),
        (lambda r: right(r, kind="float16 [1], [1]"), "its experts are float16 [1], [1]"),
        (lambda r: right(r, kind=""), "its experts are "),
        (lambda r: right(r, checksum=0), "their checksum differs"),
        (lambda r: right(r, checksum=-1), "their checksum differs"),
        (lambda r: right(r, error="it is tired"), "slot 2 of rank 1: it is tired"),
        (lambda r: [right(r)[0], b""], "it sent 0 bytes instead of "),
        (lambda r: [right(r)[0], bytes(SIZE + 1)], f"it sent {SIZE + 1} bytes instead of "),
    ],
)
def test_wrong_answers_are_an_error(fetch_from: Fetch, answer: Answer, error: str) -> None:
    fetch = fetch_from(answer)
    state = fetch.state()
    assert error in str(state.error)
    assert "rank 1" in str(state.error)
    assert not state.is_done
    with pytest.raises(AssertionError):
        _ = fetch.staged


def test_an_answer_that_comes_twice_is_an_error(fetch_from: Fetch) -> None:
    assert "nobody asked for" in str(fetch_from(lambda r: right(r, number=40)).state().error)


def test_an_answer_without_end_is_not_taken(fetch_from: Fetch) -> None:
    fetch = fetch_from(lambda r: [right(r)[0], bytes(5 * PIECE_BYTES)], timeout=0.3)
    assert "not all was there within 0.3 s" in str(fetch.state().error)


def test_an_address_that_is_none_is_an_error(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    sources = ExpertSources(
        rank=0, banks=BANKS, addresses=["", "nowhere"], context=context, numbers=itertools.count()
    )
    fetch = ExpertFetch(sources, [ExpertCopy(0, 0, 1, 0)], version=0, timeout=SOON)
    wait_until(lambda: fetch.state().error is not None)
    assert "fetching experts failed" in str(fetch.state().error)
    assert fetch.stop()


def test_nobody_home_is_an_error_in_time(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        address = f"tcp://{LOOPBACK}:{taken.getsockname()[1]}"
        sources = ExpertSources(
            rank=0, banks=BANKS, addresses=["", address], context=context, numbers=itertools.count()
        )
        fetch = ExpertFetch(sources, [ExpertCopy(0, 0, 1, 0)], version=0, timeout=0.2)
        wait_until(lambda: fetch.state().error is not None)
    assert "of rank 1: not all was there within 0.2 s" in str(fetch.state().error)
    assert fetch.stop()
