"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import SkipValidation

from moe_serve.api.schemas.common import Int64, SamplingFields, Usage
from moe_serve.messages import FinishReason


class ChatRequest(SamplingFields):
    """`messages` are checked by `api.chat_messages`. Without a cap the output fills the context."""

    messages: SkipValidation[list[dict[str, Any]]]
    logprobs: bool = False
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool = True


class ChatTopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    """Joined `bytes` of all tokens are the text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    """`routed_experts`: see `api.routed_experts`; left out unless asked for."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """`routed_experts` comes with the last chunk of the choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
