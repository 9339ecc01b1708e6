"""Which experts the tokens of a choice chose, on the wire."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

ANSWER = "Once upon a time."
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "ab"} if path == COMPLETIONS else {"messages": [
        {"role": "user", "content": "a"}]}  # fmt: skip
    return {**prompt, "max_tokens": 64, "return_routed_experts": True, **fields}


def decoded(choice: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(choice["routed_experts"], validate=True)
    ids: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    return ids


def check(choice: dict[str, Any], num_tokens: int) -> None:
    ids = decoded(choice)
    assert ids.dtype == np.int16 and ids.shape == (num_tokens, 3, 2)
    assert ids.ravel().tolist() == list(range(6 * num_tokens))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_each_choice_tells_of_all_tokens_but_the_last(server: Any, path: str, n: int) -> None:
    answer = server.strict_json(server.http.post(path, json=body_of(path, n=n)))
    assert len(answer["choices"]) == n
    usage = answer["usage"]
    # The engine's end-of-sequence token is the last.
    for choice in answer["choices"]:
        check(choice, usage["prompt_tokens"] + usage["completion_tokens"] // n - 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_brings_them_once_with_the_last_chunk(server: Any, path: str) -> None:
    body = body_of(path, n=2, stream=True, stream_options={"include_usage": True})
    events = server.events_of(server.http.post(path, json=body).content)
    usage = events[-1]["usage"]
    last = {}
    for choice in (choice for event in events for choice in event["choices"]):
        assert ("routed_experts" in choice) == (choice["finish_reason"] is not None)
        last[choice["index"]] = choice
    assert sorted(last) == [0, 1]
    for choice in last.values():
        check(choice, usage["prompt_tokens"] + usage["completion_tokens"] // 2 - 1)


def test_nothing_is_told_to_who_does_not_ask(server: Any) -> None:
    for path in (COMPLETIONS, CHAT):
        for wanted in (False, None):
            body = body_of(path, return_routed_experts=wanted)
            (choice,) = server.http.post(path, json=body).json()["choices"]
            assert "routed_experts" not in choice
            stream = server.http.post(path, json={**body, "stream": True})
            assert b"routed_experts" not in stream.content


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_ends_them_with_its_token(server: Any, is_streamed: bool) -> None:
    body = body_of(COMPLETIONS, stop="upon", stream=is_streamed)
    response = server.http.post(COMPLETIONS, json=body)
    events = server.events_of(response.content) if is_streamed else [response.json()]
    choice = events[-1]["choices"][0]
    assert choice["stop_reason"] == "upon"
    check(choice, 2 + len("Once upon") - 1)


def test_a_prompt_alone_tells_of_all_its_tokens(server: Any) -> None:
    answer = server.complete(**body_of(COMPLETIONS, max_tokens=0)).json()
    check(answer["choices"][0], 2)


def test_another_type_than_a_truth_value_is_refused(server: Any) -> None:
    for value in (1, "true", []):
        error = server.error_of(
            server.complete(**body_of(COMPLETIONS, return_routed_experts=value))
        )
        assert error["param"] == "return_routed_experts"
