"""What one engine step computes, and what comes back from the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from moe_serve.messages import TokenLogprobs
from moe_serve.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next `num_tokens` positions of one request, from `start` on, the first `num_recomputed`
    of which had been computed before it was preempted.

    `is_last`: the chunk reaches the request's last known token, so the logits after it choose
    the next one (unless the request wants no tokens at all).
    """

    request: Request
    start: int
    num_tokens: int
    num_recomputed: int = 0

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
    """Chunks of distinct requests, lane by lane. Within a lane those of one token come first, so
    that they run as one batch.

    `num_tokens_of_lanes`: the counts of all lanes, 0 for one that idles; a lane's part of the plan
    has them too, since lanes meet at the experts. Left out, there is one lane.
    """

    chunks: tuple[Chunk, ...]
    num_tokens_of_lanes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.num_tokens_of_lanes:
            object.__setattr__(self, "num_tokens_of_lanes", (self.num_tokens,))

    @classmethod
    def join(cls, lanes: Sequence[Sequence[Chunk]]) -> StepPlan:
        """The plan of all lanes, from the chunks of each."""
        return cls(
            chunks=tuple(itertools.chain(*lanes)),
            num_tokens_of_lanes=tuple(
                sum(chunk.num_tokens for chunk in chunks) for chunks in lanes
            ),
        )

    @property
    def num_lanes(self) -> int:
        return len(self.num_tokens_of_lanes)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def of_lane(self, lane: int) -> StepPlan:
        """What the ranks of one lane compute, perhaps nothing."""
        assert 0 <= lane < self.num_lanes
        chunks = tuple(chunk for chunk in self.chunks if chunk.request.lane == lane)
        return dataclasses.replace(self, chunks=chunks)


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
