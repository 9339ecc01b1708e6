"""Model names, API keys and request ids."""

from __future__ import annotations

from typing import Any

import pytest

ROUTES = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [97]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("name", ["no-such-model", "", "TINY", "tiny/"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_a_404(
    server: Any, path: str, body: Any, name: str, stream: bool
) -> None:
    response = server.http.post(path, json={**body, "model": name, "stream": stream})
    error = server.error_of(response, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "tiny" in error["message"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("name", [5, True, ["tiny"], {}])
def test_a_model_that_is_no_name_is_a_400(server: Any, path: str, body: Any, name: Any) -> None:
    assert server.error_of(server.http.post(path, json={**body, "model": name}))["param"] == "model"


@pytest.mark.parametrize("name", [None, "tiny", "path/to/tiny"])
def test_a_served_name_or_none_is_answered_with_that_name(server: Any, name: str | None) -> None:
    assert server.complete(prompt="a", model=name).json()["model"] == (name or "tiny")


def test_the_list_holds_every_served_name(server: Any) -> None:
    body = server.http.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "path/to/tiny"]
    assert all(card["object"] == "model" and card["max_model_len"] == 64 for card in body["data"])
    assert server.http.get("/v1/models/path/to/tiny").json() == body["data"][1]
    assert server.error_of(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.fixture(scope="module")
def locked_server(serve: Any) -> Any:
    return serve(api_key="sesame-é")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "sesame", "Basic sesame"])
def test_a_missing_or_wrong_key_is_a_401(locked_server: Any, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path, body in ROUTES:
        response = locked_server.http.post(path, json=body, headers=headers)
        assert locked_server.error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    for path in ("/v1/models", "/server_info", "/load", "/docs", "/nowhere"):
        assert locked_server.http.get(path, headers=headers).status_code == 401


def test_the_key_opens_and_probes_need_none(locked_server: Any) -> None:
    for scheme in (b"Bearer ", b"bearer ", b"Bearer   "):
        headers = {b"Authorization": scheme + "sesame-é".encode()}
        assert locked_server.http.get("/v1/models", headers=headers).status_code == 200
    info = locked_server.http.get("/server_info", headers=headers)
    assert info.status_code == 200 and "sesame" not in info.text
    for path in ("/health", "/live", "/ready", "/ping", "/version", "/metrics"):
        assert locked_server.http.get(path).status_code == 200


@pytest.mark.parametrize("given", ["abc", "a b", "x" * 128])
def test_a_request_id_comes_back(server: Any, given: str) -> None:
    for path in ("/health", "/nowhere"):
        response = server.http.get(path, headers={"X-Request-Id": given})
        assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"caf\xc3\xa9", b"a\tb"])
def test_an_unusable_request_id_is_replaced(server: Any, given: bytes) -> None:
    response = server.http.get("/health", headers={b"X-Request-Id": given})
    assert len(response.headers["x-request-id"]) == 32


def test_equal_request_ids_do_not_collide_in_the_engine(server: Any) -> None:
    headers = {"X-Request-Id": "same"}
    ids = {
        server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers).json()["id"]
        for _ in range(2)
    }
    assert len(ids) == 2
