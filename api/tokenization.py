"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.body import body_docs, read_request
from moe_serve.api.chat_messages import check_messages, render
from moe_serve.api.encoding import json_response
from moe_serve.api.prompts import check_ids, encode_text, most_characters
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

# Beyond the context, but not beyond what can be done while others are served.
MAX_CHARACTERS = 2**18
MAX_TOKENS = 2**16


@router.post("/tokenize", openapi_extra=body_docs("/tokenize", TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a chat. Works for texts somewhat longer than the context too."""
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
    limit = max(MAX_TOKENS, state.info.max_model_len)
    if len(body.tokens) > limit:
        raise RequestError(f"tokens has {len(body.tokens)} ids; at most {limit}", param="tokens")
    check_ids("tokens", body.tokens, state.info.vocab_size)
    text = await asyncio.to_thread(state.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(prompt=text))


async def _token_ids(state: ApiState, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        if body.prompt is None:
            raise RequestError("prompt is missing; send it, or messages", param="prompt")
        _check_length(state, body.prompt, param="prompt")
        return await encode_text(state.tokenizer, body.prompt, body.add_special_tokens)
    if body.prompt is not None:
        raise RequestError("send either prompt or messages, not both", param="messages")
    text = await render(
        state, check_messages(body.messages), add_generation_prompt=body.add_generation_prompt
    )
    _check_length(state, text, param="messages")
    return await encode_text(state.tokenizer, text, add_special_tokens=False)


def _check_length(state: ApiState, text: str, *, param: str) -> None:
    most = max(MAX_CHARACTERS, most_characters(state))
    if len(text) > most:
        raise RequestError(
            f"{param} has {len(text)} characters; at most {most} can be tokenized at once",
            param=param,
        )
