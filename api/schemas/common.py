"""Request fields and answer parts that completions and chat share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# What travels to the engine must fit 64 bits.
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopStrings = Annotated[list[str], BeforeValidator(_as_list)]


class RequestModel(BaseModel):
    """Strict types: "0.5" is no number, 1.0 and true are no integers, NaN is refused.

    `nullable`: fields where null means something else than leaving them out.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    nullable: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class SamplingFields(RequestModel):
    """How tokens are chosen, with the same names and meaning as in `SamplingParams`.

    `max_completion_tokens` wins over `max_tokens`. Either is cut to what the context leaves.
    """

    n: Int64 = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    min_tokens: Int64 = 0
    stop: StopStrings = []
    stop_token_ids: list[Int64] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_routed_experts: bool = False
    logit_bias: dict[str, float] = {}
    priority: Int64 = 0
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """`prompt_tokens` counts each prompt once, `completion_tokens` all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
