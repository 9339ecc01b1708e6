"""/v1/completions."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from pydantic import SkipValidation

from moe_serve.api.schemas.common import Int64, SamplingFields, Usage
from moe_serve.messages import FinishReason


class CompletionRequest(SamplingFields):
    """`prompt` is checked by `api.prompts`, which need not look at every id of a long list.

    `max_tokens` is 16 when absent; null fills what the context leaves.
    """

    nullable: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    max_tokens: Int64 | None = 16
    logprobs: Int64 | None = None
    echo: bool = False
    best_of: Int64 | None = None
    add_special_tokens: bool = True


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry per token. `text_offset` is in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """`routed_experts`: see `api.routed_experts`; left out unless asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of a stream (`usage` unset or null but in the last)."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
