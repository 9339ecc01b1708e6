"""POST /v1/completions."""

from __future__ import annotations

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.body import body_docs, read_request
from moe_serve.api.completion_answer import CompletionAnswer
from moe_serve.api.disconnect import until_disconnect
from moe_serve.api.encoding import json_response
from moe_serve.api.prompts import encode_prompts, split_prompts
from moe_serve.api.sampling import (
    check_num_logprobs,
    check_num_sequences,
    check_stream_options,
    sampling_params,
)
from moe_serve.api.schemas.completions import CompletionRequest
from moe_serve.api.sequences import plan_sequences
from moe_serve.api.sse import EventStream
from moe_serve.api.state import ApiState
from moe_serve.api.ticket import Ticket
from moe_serve.errors import RequestError

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_docs("/v1/completions", CompletionRequest))
async def create_completion(request: Request) -> Response:
    ticket = Ticket.of(request)
    state = ticket.state
    body = await read_request(request, CompletionRequest)
    state.check_serving()
    model = state.check_model(body.model)
    _check(state, body)
    params = sampling_params(
        state,
        body,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    raw_prompts = split_prompts(body.prompt)
    ticket.admit(check_num_sequences(state, len(raw_prompts), params.n))
    prompts = await encode_prompts(state, raw_prompts, add_special_tokens=body.add_special_tokens)
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    sequences = plan_sequences(
        state,
        prompts,
        params,
        request_id=answer_id,
        priority=body.priority,
        arrival_time=ticket.arrival_time,
    )
    answer = CompletionAnswer(
        state=state, sequences=sequences, request=body, id=answer_id, model=model
    )
    if body.stream:
        return EventStream(answer.chunks())
    return json_response(await until_disconnect(request.receive, answer.whole()))


def _check(state: ApiState, body: CompletionRequest) -> None:
    check_stream_options(body)
    check_num_logprobs(state, "logprobs", body.logprobs)
    if body.best_of is not None and body.best_of != body.n:
        raise RequestError(
            f"best_of {body.best_of} is not supported unless it equals n {body.n}",
            param="best_of",
        )
