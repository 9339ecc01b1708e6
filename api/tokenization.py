"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.body import body_docs, read_request
from moe_serve.api.chat_messages import check_messages
from moe_serve.api.encoding import json_response
from moe_serve.api.prompts import check_ids, encode_text
from moe_serve.api.schemas.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from moe_serve.api.state import ApiState
from moe_serve.api.ticket import Ticket
from moe_serve.errors import RequestError

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_docs("/tokenize", TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a chat. Works for texts longer than the context too."""
    state = Ticket.of(request).state
    body = await read_request(request, TokenizeRequest)
    state.check_model(body.model)
    max_model_len = state.info.max_model_len
    tokens = await _token_ids(state, body)
    strs = [state.tokenizer.token_text(i) for i in tokens] if body.return_token_strs else None
    return json_response(
        TokenizeResponse(
            count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=strs
        )
    )


@router.post("/detokenize", openapi_extra=body_docs("/detokenize", DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = Ticket.of(request).state
    body = await read_request(request, DetokenizeRequest)
    state.check_model(body.model)
    if not isinstance(body.tokens, list):
        raise RequestError("tokens must be a list of token ids", param="tokens")
    check_ids("tokens", body.tokens, state.info.vocab_size)
    text = await asyncio.to_thread(state.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(prompt=text))


async def _token_ids(state: ApiState, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        if body.prompt is not None:
            raise RequestError("send either prompt or messages, not both", param="messages")
        return await asyncio.to_thread(
            state.tokenizer.render_chat,
            check_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt,
        )
    if body.prompt is None:
        raise RequestError("prompt is missing; send it, or messages", param="prompt")
    return await encode_text(state.tokenizer, body.prompt, body.add_special_tokens)
