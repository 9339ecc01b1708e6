"""What one engine step computes, and what comes back from the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from moe_serve.messages import TokenLogprobs
from moe_serve.request import Request
from moe_serve.token_routes import TokenRoutes


class Chunk(NamedTuple):
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
    def phase_lengths(self) -> tuple[int, int, int]:
        """Tokens of each of `experts.recording.PHASES`. In the chunk, those recomputed come first,
        then the prompt's, then the output's."""
        request, start, num_tokens, num_recomputed = self
        num_new = num_tokens - num_recomputed
        num_decoded = start + num_tokens - len(request.prompt_token_ids)
        num_decoded = min(num_new, num_decoded) if num_decoded > 0 else 0
        return num_new - num_decoded, num_decoded, num_recomputed

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
    `records_routes`: the results tell which experts each token chose.
    """

    chunks: tuple[Chunk, ...]
    num_tokens_of_lanes: tuple[int, ...] = ()
    records_routes: bool = False

    def __post_init__(self) -> None:
        if not self.num_tokens_of_lanes:
            object.__setattr__(self, "num_tokens_of_lanes", (self.num_tokens,))

    @classmethod
    def join(cls, lanes: Sequence[Sequence[Chunk]], records_routes: bool = False) -> StepPlan:
        """The plan of all lanes, from the chunks of each. Routes are recorded where a request of
        any lane wants them, too."""
        chunks = tuple(itertools.chain(*lanes))
        wants = (chunk.request.sampling.return_routed_experts for chunk in chunks)
        return cls(
            chunks=chunks,
            num_tokens_of_lanes=tuple(
                sum(chunk.num_tokens for chunk in chunks) for chunks in lanes
            ),
            records_routes=records_routes or any(wants),
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


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


class ChunkResult(NamedTuple):
    """What the model made of one chunk.

    `sampled` is None when the chunk does not sample. `prompt_logprobs`, when the request asks
    for them: entries for the prompt positions [start + 1, min(stop + 1, num_prompt_tokens)),
    since the logits at one position tell about the next. `routes` of the chunk's tokens, in a step
    that records them, whoever wants them.
    """

    sampled: SampledToken | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    routes: TokenRoutes | None = None
