"""Streams: framing, usage, errors half-way, and clients that leave."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from moe_serve.errors import EngineDeadError, EngineError

ROUTES = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_headers_keep_proxies_from_holding_events_back(
    server: Any, path: str, body: dict[str, Any]
) -> None:
    response = server.http.post(path, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_no_usage_comes_unasked(server: Any, path: str, body: Any, options: Any) -> None:
    response = server.http.post(path, json={**body, "stream": True, "stream_options": options})
    events = server.events_of(response.content)
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_last_when_asked_for(server: Any, path: str, body: Any, n: int) -> None:
    body = {**body, "n": n, "max_tokens": 5}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = server.events_of(server.http.post(path, json={**body, **options}).content)
    assert all(event["usage"] is None and event["choices"] for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == server.http.post(path, json=body).json()["usage"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_stream_options_need_a_stream(server: Any, path: str, body: Any) -> None:
    response = server.http.post(path, json={**body, "stream_options": {"include_usage": True}})
    assert server.error_of(response)["param"] == "stream_options"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(EngineDeadError("the engine ended: killed"), 503, "engine_dead"),
     (EngineError("no blocks"), 503, "engine_unavailable"), (KeyError("secret"), 500, None)],
)  # fmt: skip
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_an_error_before_the_first_token_is_an_http_error(
    serve: Any, path: str, body: Any, error: Exception, status: int, code: str | None
) -> None:
    server = serve()
    server.engine.fail_at, server.engine.failure_error = 0, error
    for stream in (False, True):
        response = server.http.post(path, json={**body, "stream": stream, "n": 2})
        assert server.error_of(response, status)["code"] == code
        assert "secret" not in response.text
    server.engine.fail_at = None
    server.check_serves()


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("error", [EngineDeadError("the engine ended: killed"), KeyError("secret")])
def test_an_error_half_way_is_one_event_and_then_the_end(
    serve: Any, path: str, body: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    server.engine.fail_at, server.engine.failure_error = 3, error
    response = server.http.post(path, json={**body, "stream": True, "n": 2})
    events = server.events_of(response.content)
    assert [event for event in events if "error" in event] == events[-1:]
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert sum("a stream failed" in r.message for r in caplog.records) == (
        not isinstance(error, EngineDeadError)
    )
    plain = server.http.post(path, json=body)
    assert plain.status_code == (503 if isinstance(error, EngineDeadError) else 500)
    server.engine.fail_at = None
    server.check_serves()


def test_an_unexpected_exception_is_logged_once(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    server.engine.fail_at, server.engine.failure_error = 0, KeyError("secret")
    error = server.error_of(server.complete(prompt="a"), 500)
    assert error["type"] == "server_error"
    assert sum(record.exc_info is not None for record in caplog.records) == 1


@pytest.fixture(scope="module")
def slow_server(serve: Any) -> Any:
    return serve("x" * 60, step_seconds=0.05)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_when_the_client_leaves_all_its_sequences_are_aborted(
    slow_server: Any, path: str, body: Any, stream: bool, n: int
) -> None:
    engine = slow_server.engine
    engine.aborted_ids.clear()
    raw = json.dumps({**body, "stream": stream, "n": n, "max_tokens": 50}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", slow_server.port), 5) as connection:
        connection.sendall(head + raw)
        slow_server.wait_until(lambda: len(engine.open_ids) == n)
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert slow_server.state.num_open_sequences == n
    slow_server.wait_until(lambda: not engine.open_ids)
    slow_server.wait_until(lambda: slow_server.state.num_open_sequences == 0)
    assert len(engine.aborted_ids) == n


def test_one_failed_choice_frees_the_others(slow_server: Any) -> None:
    engine = slow_server.engine
    engine.aborted_ids.clear()
    engine.fail_at = 2
    response = slow_server.complete(prompt=["a", "b"], n=2)
    engine.fail_at = None
    assert response.status_code == 503
    assert engine.open_ids == set() and len(engine.aborted_ids) == 4
