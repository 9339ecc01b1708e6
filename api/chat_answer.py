"""What /v1/chat/completions answers, whole or in chunks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from moe_serve.api.encoding import encode
from moe_serve.api.logprobs import chat_logprobs
from moe_serve.api.routed_experts import routed_experts
from moe_serve.api.schemas.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    ChatResponse,
)
from moe_serve.api.schemas.common import Usage
from moe_serve.api.sequences import News, RunningSequence, follow, run_all, usage_of
from moe_serve.api.state import ApiState


@dataclasses.dataclass(kw_only=True, eq=False)
class ChatAnswer:
    """Turns the news of all sequences into one body, or into chunks that add up to it."""

    state: ApiState
    request: ChatRequest
    sequences: list[RunningSequence]
    id: str
    model: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    async def whole(self) -> ChatResponse:
        await run_all(self.state, self.sequences)
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[_choice(sequence) for sequence in self.sequences],
            usage=usage_of(self.sequences),
        )

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Each choice begins with a chunk that names the role, when its first news is there."""
        wants_usage = self.request.wants_usage_chunk
        usage = None if wants_usage else msgspec.UNSET
        started: set[int] = set()
        async with aclosing(follow(self.state, self.sequences)) as all_news:
            async for news in all_news:
                index = news.sequence.index
                if index not in started:
                    started.add(index)
                    yield encode(self._chunk([_role_choice(index)], usage))
                if news.delta.shows:
                    yield encode(self._chunk([_chunk_choice(news)], usage))
        if wants_usage:
            yield encode(self._chunk([], usage_of(self.sequences)))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None | msgspec.UnsetType
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )


def _choice(sequence: RunningSequence) -> ChatChoice:
    output = sequence.output
    return ChatChoice(
        index=sequence.index,
        message=ChatMessage(content=output.text),
        logprobs=chat_logprobs(output.logprobs),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        routed_experts=routed_experts(output),
    )


def _role_choice(index: int) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))


def _chunk_choice(news: News) -> ChatChunkChoice:
    delta = news.delta
    return ChatChunkChoice(
        index=news.sequence.index,
        delta=ChatDelta(content=delta.text),
        logprobs=chat_logprobs(delta.logprobs),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        routed_experts=routed_experts(news.sequence.output),
    )
