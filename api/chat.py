"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.body import body_docs, read_request
from moe_serve.api.chat_answer import ChatAnswer
from moe_serve.api.chat_messages import check_messages, encode_chat
from moe_serve.api.disconnect import until_disconnect
from moe_serve.api.encoding import json_response
from moe_serve.api.sampling import (
    check_num_logprobs,
    check_num_sequences,
    check_stream_options,
    sampling_params,
)
from moe_serve.api.schemas.chat import ChatRequest
from moe_serve.api.sequences import plan_sequences
from moe_serve.api.sse import EventStream
from moe_serve.api.state import ApiState
from moe_serve.api.ticket import Ticket
from moe_serve.errors import RequestError
from moe_serve.sampling_params import SamplingParams

router = APIRouter()

# The OpenAI API's own limit; --max-logprobs may be lower.
MAX_TOP_LOGPROBS = 20


@router.post("/v1/chat/completions", openapi_extra=body_docs("/v1/chat/completions", ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    ticket = Ticket.of(request)
    state = ticket.state
    body = await read_request(request, ChatRequest)
    state.check_serving()
    model = state.check_model(body.model)
    params = _check(state, body)
    messages = check_messages(body.messages)
    ticket.admit(check_num_sequences(state, 1, params.n))
    prompt = await encode_chat(state, messages, add_generation_prompt=body.add_generation_prompt)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    sequences = plan_sequences(
        state,
        [prompt],
        params,
        request_id=answer_id,
        priority=body.priority,
        arrival_time=ticket.arrival_time,
    )
    answer = ChatAnswer(state=state, request=body, sequences=sequences, id=answer_id, model=model)
    if body.stream:
        return EventStream(answer.chunks())
    return json_response(await until_disconnect(request.receive, answer.whole()))


def _check(state: ApiState, body: ChatRequest) -> SamplingParams:
    check_stream_options(body)
    params = sampling_params(state, body, logprobs=_num_logprobs(state, body))
    if params.max_tokens == 0:
        is_new_name = body.max_completion_tokens is not None
        name = "max_completion_tokens" if is_new_name else "max_tokens"
        raise RequestError(f"{name} 0 must be at least 1 in a chat", param=name)
    return params


def _num_logprobs(state: ApiState, body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs {top} must be between 0 and {MAX_TOP_LOGPROBS}",
                param="top_logprobs",
            )
        check_num_logprobs(state, "top_logprobs", top)
    return (top or 0) if body.logprobs else None
