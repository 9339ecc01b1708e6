"""Bodies that are no request: malformed, too large, or not what they seem."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import psutil
import pytest

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
MIB = 2**20


@pytest.mark.parametrize(
    "raw",
    [b"{", b"", b"  ", b"[]", b"null", b'"x"', b"5", b"true", b"NaN", b"{}", b"[" * 100_000,
     b'{"prompt": ' + b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": "a",}', b"\xff\xfe",
     b'{"prompt": "\xed\xa0\x80"}', b"{'prompt': 'a'}", b'{"prompt": "a"} x',
     b'{"prompt": ' + b"1" * 5000 + b"}", b"\x00"],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_json_object_is_a_400(server: Any, path: str, raw: bytes) -> None:
    error = server.error_of(server.post_raw(path, raw))
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw", [b'{"prompt": 5, "prompt": "a"}', b'\xef\xbb\xbf{"prompt": "a"}', b'\n{"prompt":"a"}\n']
)
def test_odd_but_legal_json_is_served(server: Any, raw: bytes) -> None:
    assert server.post_raw("/v1/completions", raw).status_code == 200


def test_the_content_type_does_not_matter(server: Any) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": content_type}
        response = server.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert response.status_code == 200


@pytest.fixture(scope="module")
def small_server(serve: Any) -> Any:
    return serve(max_body_bytes="1MiB")


def pieces(num_bytes: int) -> Any:
    """The body in parts, which httpx sends in chunks."""
    yield b'{"prompt": "'
    for _ in range(num_bytes // MIB):
        yield b"a" * MIB
    yield b'"}'


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_is_a_413_at_bounded_memory_while_others_are_served(
    small_server: Any, is_chunked: bool
) -> None:
    process = psutil.Process()
    length = 50 * MIB
    headers = {} if is_chunked else {"Content-Length": str(length + 14)}
    answers: list[Any] = []
    before = process.memory_info().rss
    thread = threading.Thread(
        target=lambda: answers.append(
            small_server.http.post("/v1/completions", content=pieces(length), headers=headers)
        )
    )
    thread.start()
    began = time.monotonic()
    assert small_server.complete(prompt="a").status_code == 200
    assert time.monotonic() - began < 2
    thread.join(20)
    error = small_server.error_of(answers[0], 413)
    assert error["code"] == "request_too_large"
    assert str(MIB) in error["message"]
    assert process.memory_info().rss - before < 30 * MIB
    small_server.check_serves()


def test_a_body_at_the_limit_is_read(small_server: Any) -> None:
    frame = len(b'{"prompt": "a", "foo": ""}')
    raw = json.dumps({"prompt": "a", "foo": "x" * (MIB - frame)}).encode()
    assert len(raw) == MIB
    assert small_server.post_raw("/v1/completions", raw).status_code == 200
    assert small_server.error_of(small_server.post_raw("/v1/completions", raw + b" "), 413)


@pytest.mark.parametrize("length", ["99999999999999999999", "1" * 5000])
def test_an_absurd_content_length_with_expect_is_refused_at_once(
    small_server: Any, length: str
) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    answer = small_server.send_bytes(head.encode())
    assert answer.split(b" ")[1] in (b"400", b"413")
    small_server.check_serves()


def test_a_client_that_leaves_within_its_body_leaves_nothing_behind(small_server: Any) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with pytest.raises(TimeoutError):
        small_server.send_bytes(head, num_seconds=0.1)
    small_server.check_serves()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/v1/models", 405), ("GET", "/v1/completions", 405),
     ("GET", "/v1/models/", 404), ("POST", "/v1/completions/", 404), ("GET", "/a%ff", 404)],
)  # fmt: skip
def test_unknown_routes_and_methods_have_the_error_shape(
    server: Any, method: str, path: str, status: int
) -> None:
    server.error_of(server.http.request(method, path), status)
