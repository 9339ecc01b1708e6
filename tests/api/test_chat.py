"""/v1/chat/completions on the wire."""

from __future__ import annotations

from typing import Any

import pytest

ANSWER = "Once upon a time."
USER = {"role": "user", "content": "x"}
MIXED = "A 世b😀é"


def test_an_answer_has_the_shape_of_the_openai_api(server: Any) -> None:
    body = server.strict_json(server.chat())
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len("u:x;")
    assert body["usage"]["completion_tokens"] == len(ANSWER) + 1


def test_a_stream_names_the_role_first_and_the_finish_reason_last(server: Any) -> None:
    events = server.events_of(server.chat(stream=True).content)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"]["content"] for choice in choices) == ANSWER
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.fixture(scope="module")
def mixed_server(serve: Any) -> Any:
    return serve(MIXED)


@pytest.mark.parametrize("max_tokens", range(1, len(MIXED.encode()) + 2))
def test_joined_deltas_are_the_whole_text_wherever_it_is_cut(
    mixed_server: Any, max_tokens: int
) -> None:
    whole = mixed_server.chat(max_tokens=max_tokens).json()["choices"][0]["message"]["content"]
    response = mixed_server.chat(max_tokens=max_tokens, stream=True)
    deltas = [e["choices"][0]["delta"]["content"] for e in mixed_server.events_of(response.content)]
    assert "".join(deltas) == whole == MIXED.encode()[:max_tokens].decode(errors="replace")
    assert all("\ufffd" not in delta for delta in deltas[:-1])


def test_line_ends_inside_a_text_do_not_cut_an_event(serve: Any) -> None:
    text = "a\u2028b\u2029c\x85d\re\nf"
    server = serve(text)
    body = server.chat(stream=True).content.decode()
    assert all(line == "" or line.startswith("data: ") for line in body.splitlines())
    events = server.events_of(body.encode())
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 3, 20])
def test_bytes_of_the_logprobs_are_the_text(mixed_server: Any, stream: bool, top: int) -> None:
    response = mixed_server.chat(logprobs=True, top_logprobs=top, stream=stream)
    if stream:
        events = mixed_server.events_of(response.content)
        parts = [event["choices"][0]["logprobs"] for event in events]
        content = [entry for part in parts if part for entry in part["content"]]
    else:
        content = mixed_server.strict_json(response)["choices"][0]["logprobs"]["content"]
    assert len(content) == len(MIXED.encode())
    assert bytes(byte for entry in content for byte in entry["bytes"]) == MIXED.encode()
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["token"] and entry["logprob"] == -0.5
        assert len(entry["top_logprobs"]) == (top or 0)
        assert all(set(t) == {"token", "logprob", "bytes"} for t in entry["top_logprobs"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
     ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
     ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
     ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 1}, "logprobs"),
     ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
     ({"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
     ({"echo": True}, "echo"), ({"stream_options": {}}, "stream_options")],
)  # fmt: skip
def test_fields_that_cannot_work_are_refused_by_name(
    server: Any, fields: dict[str, Any], param: str
) -> None:
    assert server.error_of(server.chat(**fields))["param"] == param


@pytest.mark.parametrize(
    "cap", [{"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3},
            {"max_tokens": 3}],
)  # fmt: skip
def test_either_name_caps_the_output(server: Any, cap: dict[str, int]) -> None:
    body = server.chat(**cap).json()
    assert body["usage"]["completion_tokens"] == 3
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [None, 10**9])
def test_without_a_cap_the_output_fills_the_context(server: Any, max_tokens: int | None) -> None:
    usage = server.chat("a" * 40, ignore_eos=True, max_tokens=max_tokens).json()["usage"]
    assert usage["prompt_tokens"] == 43
    assert usage["total_tokens"] == 64


@pytest.mark.parametrize(("num_letters", "status"), [(60, 200), (61, 400), (900, 400)])
def test_a_chat_must_leave_room_for_output(server: Any, num_letters: int, status: int) -> None:
    response = server.chat("a" * num_letters)
    assert response.status_code == status
    if status == 400:
        error = server.error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "64" in error["message"]


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [([USER], b"u:x;"),
     ([{**USER, "name": "bob", "id": 7}], b"u:x;"),
     ([{"role": "user", "content": ""}], b"u:;"),
     ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
      b"u:a\nb;"),
     ([USER, {"role": "assistant", "content": None}, USER], b"u:x;a:;u:x;"),
     ([USER, {"role": "assistant"}, USER], b"u:x;a:;u:x;"),
     ([USER, {"role": "assistant", "content": "y", "tool_calls": []}], b"u:x;a:y;")],
)  # fmt: skip
def test_messages_reach_the_template(server: Any, messages: Any, prompt: bytes) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert server.engine.requests[-1].prompt_token_ids == list(prompt)


@pytest.mark.parametrize(
    ("messages", "word"),
    [([{"role": "system", "content": "s"}, USER], "System role not supported"),
     ([USER, USER], "Roles must alternate"),
     ([{"role": "robot", "content": "x"}], "Unknown role robot")],
)  # fmt: skip
def test_what_the_template_says_reaches_the_client(server: Any, messages: Any, word: str) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    error = server.error_of(response)
    assert error["message"] == word and error["param"] == "messages"


@pytest.mark.parametrize(
    ("messages", "param"),
    [([], "messages"), (None, "messages"), ("x", "messages"), ({}, "messages"),
     ([5], "messages[0]"), ([{}], "messages[0].role"), ([{"role": 5}], "messages[0].role"),
     ([USER, {"role": "user"}], "messages[1].content"),
     ([{"role": "user", "content": None}], "messages[0].content"),
     ([{"role": "user", "content": 5}], "messages[0].content"),
     ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
     ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
     ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0]"),
     ([USER, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls")],
)  # fmt: skip
def test_messages_of_another_form_are_refused_by_place(
    server: Any, messages: Any, param: str
) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert server.error_of(response)["param"] == param


def test_without_a_template_chat_gives_a_hint_and_completions_work(serve: Any) -> None:
    server = serve(template=None)
    assert "--chat-template" in server.error_of(server.chat())["message"]
    server.check_serves()


def test_several_choices_each_begin_with_their_role(server: Any) -> None:
    fields = {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 5}
    whole = server.chat(**fields).json()
    events = server.events_of(server.chat(stream=True, **fields).content)
    for index in range(2):
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        assert parts[0]["delta"]["role"] == "assistant"
        text = "".join(part["delta"]["content"] for part in parts)
        assert text == whole["choices"][index]["message"]["content"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 2
