"""The official client, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

ANSWER = "Once upon a time."
MESSAGES: Any = [{"role": "user", "content": "x"}]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        yield client


def test_completion_with_two_choices_a_stop_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a", n=2, stop=" up", logprobs=2)
    assert [choice.text for choice in answer.choices] == ["Once", "Once"]
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "Once up"
    assert answer.usage is not None and answer.usage.completion_tokens == 14


def test_streamed_completion(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=64)
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER


def test_chat_with_two_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, stop=["time"]
    )
    assert [choice.message.content for choice in answer.choices] == ["Once upon a "] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["O", "P"]


def test_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 4


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=5)
    assert bad.value.param == "temperature"


def test_an_error_within_a_stream_arrives_as_an_exception(
    client: openai.OpenAI, server: Any
) -> None:
    server.engine.fail_at = 3
    with pytest.raises(openai.APIError, match="the engine ended"):
        list(client.completions.create(model="tiny", prompt="a", stream=True))
    server.engine.fail_at = None


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "path/to/tiny"]


def test_many_requests_at_once_from_the_async_client(server: Any) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False),
        ) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="tiny", prompt="a", max_tokens=1 + i)
                    for i in range(17)
                )
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [ANSWER[: 1 + i] for i in range(17)]
