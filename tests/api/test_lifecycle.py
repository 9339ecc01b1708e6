"""Starting, serving, full, draining, dead: what each state answers."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from typing import Any

import pytest

PROBES = ["/health", "/ready", "/ping"]
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def post_all(server: Any) -> list[Any]:
    requests = [
        ("/v1/completions", {"prompt": "a"}), ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", CHAT),
    ]  # fmt: skip
    return [server.http.post(path, json=body) for path, body in requests]


def test_a_starting_server_is_alive_but_not_ready(serve: Any) -> None:
    server = serve()
    engine = server.engine
    info, engine.info, engine.status = engine.info, None, "starting"
    for path in PROBES:
        response = server.http.get(path)
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
        assert server.http.head(path).status_code == 503
    assert server.http.get("/live").status_code == 200
    assert server.error_of(server.http.get("/v1/models"), 503)
    for response in post_all(server):
        assert server.error_of(response, 503)["code"] == "engine_unavailable"
    assert server.http.get("/metrics").status_code == 200
    assert server.http.get("/server_info").json()["engine"] is None
    engine.info, engine.status = info, "ready"
    server.check_serves()


def test_a_dead_engine_is_told_with_its_cause(serve: Any) -> None:
    server = serve()
    server.engine.status, server.engine.failure = "dead", "exit code -9"
    for path in PROBES:
        response = server.http.get(path)
        assert response.status_code == 503
        assert response.json() == {"status": "dead", "message": "exit code -9"}
    for response in post_all(server):
        error = server.error_of(response, 503)
        assert error["code"] == "engine_dead" and "exit code -9" in error["message"]
    assert server.http.get("/live").status_code == 200
    assert server.http.get("/metrics").status_code == 200


def test_draining_refuses_the_new_and_finishes_the_old(serve: Any) -> None:
    server = serve(step_seconds=0.02)
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.complete(prompt="a", stream=True, max_tokens=64))
    )
    thread.start()
    server.wait_until(lambda: server.state.num_open_sequences == 1)
    server.state.start_draining()
    for path in PROBES:
        response = server.http.get(path)
        assert (response.status_code, response.json()) == (503, {"status": "draining"})
    for response in post_all(server):
        assert server.error_of(response, 503)["code"] == "shutting_down"
    assert server.http.get("/live").status_code == 200
    thread.join(5)
    events = server.events_of(answers[0].content)
    assert "".join(e["choices"][0]["text"] for e in events) == server.engine.answer.decode()
    server.wait_until(lambda: server.state.num_open_sequences == 0)
    asyncio.run(asyncio.wait_for(server.state.wait_drained(), 1))


def test_a_full_queue_is_a_429_that_says_when_to_retry(serve: Any) -> None:
    server = serve(step_seconds=0.02, max_queue_len=3)
    thread = threading.Thread(target=lambda: server.complete(prompt="a", n=2, max_tokens=64))
    thread.start()
    server.wait_until(lambda: server.state.num_open_sequences == 2)
    response = server.complete(prompt="a", n=2)
    error = server.error_of(response, 429)
    assert error["type"] == "rate_limit_error" and "3" in error["message"]
    assert response.headers["retry-after"] == "1"
    assert server.complete(prompt="a", max_tokens=1).status_code == 200
    thread.join(5)
    assert server.complete(prompt="a", n=3, max_tokens=1).status_code == 200
    assert server.error_of(server.complete(prompt="a", n=4))["param"] == "n"
    server.check_serves()


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": "a" * 100}, {"prompt": [999]}])
def test_a_refused_request_gives_its_place_back(serve: Any, body: Any) -> None:
    server = serve(max_queue_len=1)
    for _ in range(3):
        server.error_of(server.complete(**body))
    server.check_serves()


def test_an_engine_that_ends_one_request_tells_its_client(serve: Any) -> None:
    server = serve()
    updates = server.engine._updates

    def failing(request: Any) -> Any:
        for update in updates(request):
            yield update._replace(finish_reason="error", error="logits are not finite")

    server.engine._updates = failing
    assert "logits" in server.error_of(server.complete(prompt="a"), 500)["message"]
    server.engine._updates = updates
    server.check_serves()


def test_version_load_and_server_info(server: Any) -> None:
    assert set(server.http.get("/version").json()) == {"version"}
    assert isinstance(server.http.get("/load").json()["server_load"], int)
    info = server.http.get("/server_info").json()
    assert info["status"] == "ready" and info["models"][0] == "tiny"
    assert info["engine"]["max_model_len"] == 64
    assert info["config"]["max_num_seqs"] == 64 and "api_key" not in info["config"]


def test_the_openapi_page_describes_the_bodies(server: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = server.http.get("/openapi.json").json()
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        body = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert field in body["properties"] and field in body["required"]
    for reference in set(find_references(page)):
        target = page
        for part in reference.removeprefix("#/").split("/"):
            target = target[part.replace("~1", "/")]
        assert "properties" in target


def find_references(page: Any) -> list[str]:
    found: list[str] = []
    json.loads(json.dumps(page), object_hook=lambda o: found.append(o.get("$ref", "")) or o)
    return [reference for reference in found if reference]
