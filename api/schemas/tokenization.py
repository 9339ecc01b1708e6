"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import SkipValidation

from moe_serve.api.schemas.common import RequestModel


class TokenizeRequest(RequestModel):
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: SkipValidation[list[dict[str, Any]]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    tokens: SkipValidation[list[int]]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str
