"""The sequences of one request: sent to the engine, followed, and cleaned up after.

prompts x n --plan_sequences--> RunningSequence ... --follow--> (sequence, delta) ... in any order
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from moe_serve.api.interleave import interleave
from moe_serve.api.metrics import SequenceTimer
from moe_serve.api.prompts import Prompt
from moe_serve.api.sampling import fit
from moe_serve.api.schemas.common import PromptTokensDetails, Usage
from moe_serve.api.state import ApiState
from moe_serve.choices import fan_out
from moe_serve.errors import EngineError, RequestError, RequestFailedError
from moe_serve.messages import AddRequest
from moe_serve.output import OutputAssembler, OutputDelta, SequenceOutput
from moe_serve.sampling_params import SamplingParams


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """One choice of the answer. `output` is what came so far."""

    index: int
    prompt: Prompt
    request: AddRequest
    assembler: OutputAssembler
    timer: SequenceTimer
    output: SequenceOutput


class News(NamedTuple):
    sequence: RunningSequence
    delta: OutputDelta


def plan_sequences(
    state: ApiState,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int,
    arrival_time: float,
) -> list[RunningSequence]:
    """n sequences for each prompt, in the order of their indices. Nothing is sent yet."""
    sequences: list[RunningSequence] = []
    for number, prompt in enumerate(prompts):
        fitted = fit(params, len(prompt.token_ids), state.info.max_model_len)
        for choice in fan_out(f"{request_id}-{number}", fitted):
            request = AddRequest(
                request_id=choice.request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=choice.params,
                priority=priority,
                arrival_time=arrival_time,
            )
            sequences.append(_sequence(state, len(sequences), prompt, request))
    return sequences


def _sequence(state: ApiState, index: int, prompt: Prompt, request: AddRequest) -> RunningSequence:
    return RunningSequence(
        index=index,
        prompt=prompt,
        request=request,
        assembler=OutputAssembler(
            request.request_id, state.tokenizer, request.sampling, request.prompt_token_ids
        ),
        timer=SequenceTimer(
            metrics=state.metrics,
            arrival_time=request.arrival_time,
            num_prompt_tokens=len(request.prompt_token_ids),
        ),
        output=SequenceOutput(request_id=request.request_id),
    )


def follow(state: ApiState, sequences: Sequence[RunningSequence]) -> AsyncGenerator[News, None]:
    """Run all sequences. Closing this, or an error in one of them, aborts those still open."""
    return interleave([_follow_one(state, sequence) for sequence in sequences])


async def run_all(state: ApiState, sequences: Sequence[RunningSequence]) -> None:
    """Run all sequences to their ends; what they said is in their `output`."""
    async with aclosing(follow(state, sequences)) as all_news:
        async for _ in all_news:
            pass


async def _follow_one(state: ApiState, sequence: RunningSequence) -> AsyncGenerator[News, None]:
    reason = "abort"
    try:
        # Leaving early, as after a stop string, closes the engine's stream: that aborts it there.
        async with aclosing(state.engine.generate(sequence.request)) as updates:
            async for update in updates:
                sequence.timer.observe(update, time.time())
                delta = sequence.assembler.feed(update)
                sequence.output.add(delta)
                reason = delta.finish_reason or reason
                _check(delta)
                yield News(sequence, delta)
                if delta.finish_reason is not None:
                    return
    finally:
        sequence.timer.finish(reason, time.time())


def _check(delta: OutputDelta) -> None:
    if delta.finish_reason == "error":
        if delta.is_client_fault:
            raise RequestError(delta.error or "the engine refused this request")
        raise RequestFailedError(delta.error or "the engine failed on this request")
    if delta.finish_reason == "abort":
        raise EngineError("the server ended this request before it was complete")


def usage_of(sequences: Sequence[RunningSequence]) -> Usage:
    """Each prompt once: as cached count, what its luckless choice found."""
    cached: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for sequence in sequences:
        prompt = id(sequence.prompt)
        found = sequence.output.num_cached_tokens
        cached[prompt] = min(found, cached.get(prompt, found))
        lengths[prompt] = len(sequence.prompt.token_ids)
    num_prompt = sum(lengths.values())
    num_output = sum(sequence.output.num_output_tokens for sequence in sequences)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(cached.values())),
    )
