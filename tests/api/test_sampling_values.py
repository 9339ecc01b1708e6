"""Sampling values at and beyond their limits, as raw JSON."""

from __future__ import annotations

from typing import Any

import pytest

PATHS = ["/v1/completions", "/v1/chat/completions"]
HUGE = "1" + "0" * 400
GOOD = {
    "temperature": ["0", "1e-6", "1e-30", "2", "null", "1"],
    "top_p": ["0", "1", "1e-9", "null"],
    "min_p": ["0", "1"],
    "presence_penalty": ["-2", "2"],
    "frequency_penalty": ["-2", "2"],
    "repetition_penalty": ["0.1", "10"],
    "top_k": ["-1", "0", "1"],
    "seed": ["0", "-5", "9223372036854775807"],
    "logit_bias": ["{}", '{"5": -100}', '{"5": 100}', "null"],
    "stop_token_ids": ["[]", "[257]"],
    "priority": ["-1", "1000000"],
    "user": ['"u"'],
    "foo": ["1", "NaN", '{"a": [1]}'],
}
BAD = {
    "temperature": ["-1", "3", "NaN", "Infinity", "-Infinity", '"0.5"', "true", "1e999", HUGE,
                    "[]"],
    "top_p": ["-0.5", "2", "NaN", '"1"'],
    "min_p": ["-1", "2", "NaN"],
    "presence_penalty": ["10", "-2.1", "NaN"],
    "frequency_penalty": ["10", "-10", "Infinity"],
    "repetition_penalty": ["0", "-1", "NaN"],
    "top_k": ["-2", "1.5", "NaN", '"1"', "true", HUGE],
    "seed": ["1.5", '"1"', HUGE, "9223372036854775808"],
    "n": ["0", "-1", "1.0", "true", '"2"', "[1]", HUGE],
    "max_tokens": ["-1", "1.5", '"3"', "NaN", "true", HUGE],
    "logit_bias": ['{"258": 1}', '{"-1": 1}', '{"abc": 1}', '{"5": 1e9}', '{"5": NaN}',
                   '{"5": "1"}', '{"1_0": 1}', '{" 5": 1}', '{"\u0665": 1}', "[1]",
                   '{"' + "9" * 5000 + '": 1}'],
    "stop_token_ids": ["[258]", "[-1]", "[1.5]", '["a"]', "5"],
    "stream": ['"true"', "1"],
    "ignore_eos": ["1"],
    "min_tokens": ["-1", "1.5"],
    "priority": ["1.5", HUGE],
    "skip_special_tokens": ['"no"'],
    "stream_options": ['{"include_usage": true}', "5"],
}  # fmt: skip


def body_with(path: str, name: str, raw: str) -> bytes:
    prompt = (
        '"prompt": "a"' if "chat" not in path else '"messages": [{"role":"user","content":"a"}]'
    )
    return f'{{{prompt}, "{name}": {raw}}}'.encode()


def cases(table: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(name, raw, id=f"{name}={raw[:20]}") for name in table for raw in table[name]
    ]


@pytest.mark.parametrize(("name", "raw"), cases(GOOD))
@pytest.mark.parametrize("path", PATHS)
def test_a_value_in_range_is_served(server: Any, path: str, name: str, raw: str) -> None:
    response = server.post_raw(path, body_with(path, name, raw))
    assert response.status_code == 200, response.text
    server.strict_json(response)


@pytest.mark.parametrize(("name", "raw"), cases(BAD))
@pytest.mark.parametrize("path", PATHS)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(
    server: Any, path: str, name: str, raw: str
) -> None:
    error = server.error_of(server.post_raw(path, body_with(path, name, raw)))
    assert error["param"] == name
    assert name in error["message"]
    assert error["type"] == "invalid_request_error"


def test_bad_requests_leave_a_running_stream_alone(serve: Any) -> None:
    server = serve(step_seconds=0.01)
    with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True,
                            "max_tokens": 64}) as stream:  # fmt: skip
        lines = stream.iter_raw()
        parts = [next(lines)]
        for name in ("logit_bias", "stop_token_ids"):
            for raw in BAD[name]:
                server.error_of(server.post_raw(PATHS[0], body_with(PATHS[0], name, raw)))
        parts += lines
    events = server.events_of(b"".join(parts))
    assert "".join(event["choices"][0]["text"] for event in events) == "Once upon a time."


@pytest.mark.parametrize(
    ("name", "value"),
    [("response_format", {"type": "json_object"}),
     ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}),
     ("response_format", {"type": "nonsense"}), ("response_format", 5),
     ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]),
     ("audio", {}), ("suffix", "x"), ("guided_json", {}), ("prompt_logprobs", 1),
     ("use_beam_search", True), ("truncate_prompt_tokens", 3), ("allowed_token_ids", [1]),
     ("reasoning_effort", "high")],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_a_known_field_that_is_not_offered_is_refused_by_name(
    server: Any, path: str, name: str, value: Any
) -> None:
    body = (
        {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": ""}]}
    )
    assert server.error_of(server.http.post(path, json={**body, name: value}))["param"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("response_format", {"type": "text"}), ("tools", []), ("tools", None),
     ("tool_choice", "none"), ("user", "u"), ("metadata", {"a": "b"}), ("store", True),
     ("parallel_tool_calls", True), ("foo", 1), ("use_beam_search", False)],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_asks_for_nothing_is_served(
    server: Any, path: str, name: str, value: Any
) -> None:
    body = (
        {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": ""}]}
    )
    assert server.http.post(path, json={**body, name: value}).status_code == 200


def test_half_a_surrogate_pair_is_refused_by_name(server: Any) -> None:
    for name in ("prompt", "stop", "model"):
        body = '{"prompt": "a", "%s": "\\ud800"}' % name  # noqa: UP031
        assert server.error_of(server.post_raw("/v1/completions", body.encode()))["param"] == name
    whole_pair = b'{"prompt": "\\ud83d\\ude00", "echo": true, "max_tokens": 0}'
    answer = server.post_raw("/v1/completions", whole_pair).json()
    assert answer["choices"][0]["text"] == "\N{GRINNING FACE}"
