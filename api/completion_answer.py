"""What /v1/completions answers, whole or in chunks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from moe_serve.api.encoding import encode
from moe_serve.api.logprobs import CompletionLogprobWriter, joined
from moe_serve.api.routed_experts import routed_experts
from moe_serve.api.schemas.common import Usage
from moe_serve.api.schemas.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from moe_serve.api.sequences import News, RunningSequence, follow, run_all, usage_of
from moe_serve.api.state import ApiState


@dataclasses.dataclass(kw_only=True, eq=False)
class CompletionAnswer:
    """Turns the news of all sequences into one body, or into chunks that add up to it."""

    state: ApiState
    request: CompletionRequest
    sequences: list[RunningSequence]
    id: str
    model: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._writers = [CompletionLogprobWriter(self.state.tokenizer) for _ in self.sequences]

    async def whole(self) -> CompletionResponse:
        await run_all(self.state, self.sequences)
        choices = [self._choice(sequence) for sequence in self.sequences]
        return self._response(choices, usage_of(self.sequences))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        wants_usage = self.request.wants_usage_chunk
        usage = None if wants_usage else msgspec.UNSET
        echoed: set[int] = set()
        async with aclosing(follow(self.state, self.sequences)) as all_news:
            async for news in all_news:
                index = news.sequence.index
                if index not in echoed and self._can_echo(news.sequence):
                    echoed.add(index)
                    yield encode(self._response([self._echo(news.sequence)], usage))
                if news.delta.shows:
                    yield encode(self._response([self._chunk(news)], usage))
        if wants_usage:
            yield encode(self._response([], usage_of(self.sequences)))

    def _choice(self, sequence: RunningSequence) -> CompletionChoice:
        output = sequence.output
        echo = self._echo_text(sequence) if self.request.echo else ""
        return CompletionChoice(
            index=sequence.index,
            text=echo + output.text,
            logprobs=self._logprobs(sequence) if self.request.logprobs is not None else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            routed_experts=routed_experts(output),
        )

    def _logprobs(self, sequence: RunningSequence) -> CompletionLogprobs:
        """Of the echoed prompt, if there is one, and the output."""
        writer = self._writers[sequence.index]
        echo = self._echo_logprobs(sequence) if self.request.echo else None
        output = writer.write(sequence.output.logprobs or [])
        return output if echo is None else joined(echo, output)

    def _chunk(self, news: News) -> CompletionChoice:
        delta = news.delta
        writer = self._writers[news.sequence.index]
        return CompletionChoice(
            index=news.sequence.index,
            text=delta.text,
            logprobs=writer.write(delta.logprobs) if delta.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            routed_experts=routed_experts(news.sequence.output),
        )

    def _can_echo(self, sequence: RunningSequence) -> bool:
        """With logprobs, the echo waits for those of the prompt: they come with the first token."""
        if not self.request.echo:
            return False
        return self.request.logprobs is None or sequence.output.prompt_logprobs is not None

    def _echo(self, sequence: RunningSequence) -> CompletionChoice:
        return CompletionChoice(
            index=sequence.index,
            text=self._echo_text(sequence),
            logprobs=self._echo_logprobs(sequence),
        )

    def _echo_text(self, sequence: RunningSequence) -> str:
        """As sent, or decoded from the ids that were sent."""
        if sequence.prompt.text is not None:
            return sequence.prompt.text
        return self.state.tokenizer.decode(
            sequence.prompt.token_ids, skip_special_tokens=self.request.skip_special_tokens
        )

    def _echo_logprobs(self, sequence: RunningSequence) -> CompletionLogprobs | None:
        entries = sequence.output.prompt_logprobs
        if entries is None:
            return None
        writer = self._writers[sequence.index]
        return writer.write_prompt(
            sequence.prompt.token_ids,
            entries,
            text=self._echo_text(sequence),
            skip_special_tokens=self.request.skip_special_tokens,
        )

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | None | msgspec.UnsetType
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )
