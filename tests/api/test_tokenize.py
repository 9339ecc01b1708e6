"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_text_becomes_ids_and_comes_back(server: Any) -> None:
    body = server.http.post("/tokenize", json={"prompt": "hé"}).json()
    assert body == {
        "count": 3, "max_model_len": 64, "tokens": [104, 195, 169], "token_strs": None,
    }  # fmt: skip
    back = server.http.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert back == {"prompt": "hé"}


def test_token_strings_on_request(server: Any) -> None:
    body = {"prompt": "hé", "return_token_strs": True}
    strs = server.http.post("/tokenize", json=body).json()["token_strs"]
    assert strs == ["h", "\ufffd", "\ufffd"]


def test_special_tokens_are_added_unless_told_not_to(serve: Any) -> None:
    server = serve(adds_bos=True)
    for add, tokens in ((True, [257, 97]), (False, [97])):
        body = {"prompt": "a", "add_special_tokens": add}
        assert server.http.post("/tokenize", json=body).json()["tokens"] == tokens
    assert server.http.post("/detokenize", json={"tokens": [257, 97]}).json()["prompt"] == "<bos>a"


def test_a_chat_is_rendered_as_for_completion(server: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(tokens) == b"u:x;"


def test_texts_longer_than_the_context_can_be_counted(server: Any) -> None:
    assert server.http.post("/tokenize", json={"prompt": "a" * 5000}).json()["count"] == 5000
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
     ("/tokenize", {"prompt": ["a"]}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
     ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "messages"),
     ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
     ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"),
     ("/detokenize", {"tokens": [258]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
     ("/detokenize", {"tokens": [1.0]}, "tokens"), ("/detokenize", {"tokens": [True]}, "tokens")],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    server: Any, path: str, body: Any, param: str
) -> None:
    assert server.error_of(server.http.post(path, json=body))["param"] == param


def test_what_would_hold_up_the_others_is_refused(server: Any) -> None:
    text = "ab " * 100_000
    messages = [{"role": "user", "content": text}]
    for path, body, param in (
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": messages}, "messages"),
        ("/detokenize", {"tokens": [97] * 70_000}, "tokens"),
    ):
        error = server.error_of(server.http.post(path, json=body))
        assert error["param"] == param and "at most" in error["message"]
    server.check_serves()


def test_every_part_of_a_message_counts_for_the_length(serve: Any) -> None:
    server = serve(template="{% for m in messages %}{{ m.name }}{% endfor %}")
    messages = [{"role": "user", "content": "x", "name": "n" * 400}]
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert server.error_of(response)["code"] == "context_length_exceeded"
    empty = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user"}]})
    assert server.error_of(empty)["param"].startswith("messages")
