"""/v1/completions on the wire."""

from __future__ import annotations

from typing import Any

import pytest

ANSWER = "Once upon a time."


def test_an_answer_has_the_shape_and_the_counts_of_the_openai_api(server: Any) -> None:
    body = server.strict_json(server.complete(prompt="hello", max_tokens=64))
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "text": ANSWER,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": len(ANSWER) + 1,
        "total_tokens": 5 + len(ANSWER) + 1,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_every_form_of_prompt_reaches_the_engine_as_its_token_ids(
    server: Any, prompt: Any, sent: list[list[int]]
) -> None:
    server.engine.requests.clear()
    body = server.complete(prompt=prompt, max_tokens=3).json()
    assert [request.prompt_token_ids for request in server.engine.requests] == sent
    assert [choice["index"] for choice in body["choices"]] == list(range(len(sent)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, sent))
    assert body["usage"]["completion_tokens"] == 3 * len(sent)


def test_a_tokenizer_that_adds_bos_adds_it_unless_told_not_to(serve: Any) -> None:
    server = serve(adds_bos=True)
    server.complete(prompt="a")
    server.complete(prompt="a", add_special_tokens=False)
    assert [r.prompt_token_ids for r in server.engine.requests] == [[257, 97], [97]]
    assert server.complete(prompt="").status_code == 200


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[97], []], None])
def test_a_prompt_without_tokens_is_refused_by_name(server: Any, prompt: Any) -> None:
    assert server.error_of(server.complete(prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [[258], [-1], [2**63 - 1], [10**30], [1.5], [1.0], [True], ["a", 1], [1, "a"], [[1], 2],
     [{}], {}, 5, True, [[[1]]]],
)  # fmt: skip
def test_a_prompt_of_anything_but_known_ids_is_refused_by_name(server: Any, prompt: Any) -> None:
    assert server.error_of(server.complete(prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize("num_tokens", [62, 63, 64, 65, 1000])
@pytest.mark.parametrize(
    "cap", [{"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 10}, {"max_tokens": None},
            {"max_completion_tokens": 10}, {"max_tokens": 10**12}],
)  # fmt: skip
@pytest.mark.parametrize("as_ids", [False, True])
def test_output_is_cut_to_the_context_and_the_prompt_never(
    server: Any, num_tokens: int, cap: dict[str, Any], as_ids: bool
) -> None:
    prompt = [97] * num_tokens if as_ids else "a" * num_tokens
    response = server.complete(prompt=prompt, ignore_eos=True, **cap)
    if num_tokens >= 64:
        error = server.error_of(response)
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert str(num_tokens) in error["message"] and "64" in error["message"]
        return
    asked = cap.get("max_tokens", cap.get("max_completion_tokens"))
    room = 64 - num_tokens
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == num_tokens
    assert usage["completion_tokens"] == (room if asked is None else min(asked, room))
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenized(server: Any) -> None:
    error = server.error_of(server.complete(prompt="a" * 2_000_000))
    assert error["code"] == "context_length_exceeded"
    assert "2000000 characters" in error["message"]


def test_max_tokens_is_16_when_absent(server: Any) -> None:
    body = server.complete(prompt="a", ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 16


def test_max_completion_tokens_wins_over_max_tokens(server: Any) -> None:
    body = server.complete(prompt="a", max_tokens=9, max_completion_tokens=3).json()
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("prompt", ["hé", [104, 195, 169]])
def test_echo_gives_the_prompt_and_its_logprobs(
    server: Any, stream: bool, logprobs: int | None, max_tokens: int, prompt: Any
) -> None:
    fields = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
    choice = merged(server, fields) if stream else server.complete(**fields).json()["choices"][0]
    assert choice["text"] == "hé" + "On"[:max_tokens]
    assert choice["finish_reason"] == "length"
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    names = ["h", "bytes:\\xc3", "bytes:\\xa9", "O", "n"][: 3 + max_tokens]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (2 + max_tokens)
    assert choice["logprobs"]["top_logprobs"] == [None] + [{name: -0.5} for name in names[1:]]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3][: 3 + max_tokens]


def merged(server: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The chunks of a stream with one choice, added up."""
    whole: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None}
    for event in server.events_of(server.complete(stream=True, **fields).content):
        (choice,) = event["choices"]
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return whole


def test_zero_tokens_without_echo_is_an_empty_answer(server: Any) -> None:
    body = server.complete(prompt="hello", max_tokens=0).json()
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] == 0


def test_logprobs_list_the_alternatives_and_the_token(server: Any) -> None:
    body = server.complete(prompt="a", max_tokens=2, logprobs=2).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["O", "n"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"O": -0.5, "P": -1.5}, {"n": -0.5, "o": -1.5}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_logprob_that_is_not_finite_becomes_null(serve: Any, value: float, stream: bool) -> None:
    server = serve()
    server.engine.logprob_override = value
    fields = {"prompt": "a", "max_tokens": 2, "logprobs": 0}
    choice = merged(server, fields) if stream else server.strict_json(server.complete(**fields))
    logprobs = (choice if stream else choice["choices"][0])["logprobs"]
    assert logprobs["token_logprobs"] == [None, None]


@pytest.fixture(scope="module")
def stop_server(serve: Any) -> Any:
    return serve("ab cd<STOP>ef")


STOPS = [["<STOP>"], ["cd<", "d<S"], ["P"], ["nowhere"], "<STOP>", ["ef", "b c"]]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_string_cuts_both_modes_alike_and_frees_the_engine(
    stop_server: Any, stop: Any, keep: bool, n: int
) -> None:
    server = stop_server
    full = server.engine.answer.decode()
    server.engine.aborted_ids.clear()
    stops = [stop] if isinstance(stop, str) else stop
    ends = [(full.index(s) + len(s), -len(s)) for s in stops if s in full]
    end, minus_length = min(ends, default=(len(full), 0))
    expected = full[: end if keep else end + minus_length]
    fields = {
        "prompt": "x", "n": n, "max_tokens": 64, "stop": stop, "include_stop_str_in_output": keep,
    }  # fmt: skip
    body = server.complete(**fields).json()
    texts = [""] * n
    reasons: list[Any] = [None] * n
    for event in server.events_of(server.complete(stream=True, **fields).content):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in body["choices"]] == [expected] * n
    assert reasons == [choice["finish_reason"] for choice in body["choices"]] == ["stop"] * n
    assert body["usage"]["completion_tokens"] == n * (end if ends else len(full) + 1)
    assert body["choices"][0]["stop_reason"] == (full[end + minus_length : end] if ends else None)
    assert len(server.engine.aborted_ids) == (2 * n if ends else 0)
    server.check_serves()


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], 5, {}, ["x"] * 17])
def test_a_stop_list_that_cannot_work_is_refused_by_name(server: Any, stop: Any) -> None:
    assert server.error_of(server.complete(prompt="a", stop=stop))["param"] == "stop"


@pytest.mark.parametrize("stop", [[], None])
def test_an_empty_stop_list_means_no_stop(server: Any, stop: Any) -> None:
    body = server.complete(prompt=[1, 2], max_tokens=8, stop=stop).json()
    assert body["usage"]["completion_tokens"] == 8


def test_several_choices_keep_their_index_and_repeat_with_the_seed(server: Any) -> None:
    fields = {"prompt": [1, 2, 3], "n": 3, "temperature": 1, "seed": 11, "max_tokens": 8,
              "logprobs": 1}  # fmt: skip
    first = server.complete(**fields).json()
    again = server.complete(**fields).json()
    assert first["choices"] == again["choices"]
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert first["usage"]["prompt_tokens"] == 3
    assert first["usage"]["completion_tokens"] == 24
    streamed = ["", "", ""]
    for event in server.events_of(server.complete(stream=True, **fields).content):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_choices_of_several_prompts_stand_in_prompt_order(server: Any) -> None:
    body = server.complete(prompt=["ab", "c"], n=2, max_tokens=0, echo=True).json()
    assert [choice["text"] for choice in body["choices"]] == ["ab", "ab", "c", "c"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3


def test_cached_tokens_are_counted_once_a_prompt(server: Any) -> None:
    usage = server.complete(prompt=["ab", "c"], n=3, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_streamed_echo_waits_for_the_logprobs_of_the_prompt(serve: Any) -> None:
    server = serve()
    server.engine.starts_empty = True
    choice = merged(server, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 1})
    assert choice["text"] == "abO"
    assert choice["logprobs"]["tokens"] == ["a", "b", "O"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 0}, "n"), ({"n": 129}, "n"), ({"prompt": ["a"] * 129}, "prompt"),
     ({"prompt": ["a"] * 65, "n": 2}, "prompt"), ({"logprobs": 21}, "logprobs"),
     ({"logprobs": -1}, "logprobs"), ({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"),
     ({"max_tokens": -1}, "max_tokens"), ({"min_tokens": 20}, "min_tokens")],
)  # fmt: skip
def test_limits_are_refused_by_name(server: Any, fields: dict[str, Any], param: str) -> None:
    assert server.error_of(server.complete(**{"prompt": "a", **fields}))["param"] == param


def test_sampling_fields_reach_the_engine(server: Any) -> None:
    server.engine.requests.clear()
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.25,
        "presence_penalty": -0.25, "repetition_penalty": 1.5, "seed": 7, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [4], "skip_special_tokens": False,
    }  # fmt: skip
    server.complete(prompt="a", priority=-3, logit_bias={"5": -100}, **fields)
    (request,) = server.engine.requests
    sent = {name: getattr(request.sampling, name) for name in fields}
    assert sent == {**fields, "stop_token_ids": (4,)}
    assert request.sampling.logit_bias == {5: -100.0}
    assert request.priority == -3
    assert request.sampling.max_tokens == 16
