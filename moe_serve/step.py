"""What one engine step computes, and what comes back from the model."""

from __future__ import annotations

import dataclasses

from moe_serve.messages import TokenLogprobs
from moe_serve.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next `num_tokens` positions of one request, from `start` on.

    `is_last`: the chunk reaches the request's last known token, so the logits after it choose
    the next one (unless the request wants no tokens at all).
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_tokens

    @property
    def samples(self) -> bool:
        return self.is_last and self.request.max_tokens > 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks of distinct requests. Those of one token come first, so that they run as one batch."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """What the model made of one chunk.

    `sampled` is None when the chunk does not sample. `prompt_logprobs`, when the request asks
    for them: entries for the prompt positions [start + 1, min(stop + 1, num_prompt_tokens)),
    since the logits at one position tell about the next.
    """

    sampled: SampledToken | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
