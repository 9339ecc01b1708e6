"""The life of one sequence inside the engine."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import MutableSequence

from moe_serve.messages import AddRequest, TokenLogprobs
from moe_serve.sampling_params import SamplingParams
from moe_serve.token_routes import TokenRoutes


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def no_blocks() -> MutableSequence[int]:
    """An empty sequence of block ids. An array of int64, which numpy reads as it is: a step reads
    all of them."""
    return array("q")


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable state of a request; the scheduler owns it and nobody else writes to it.

    tokens:      [ prompt ............ | output ....... ]
    computed:    [ 0 .. num_computed_tokens )            their K/V stand in `block_ids`
    to compute:                        [ num_computed_tokens .. num_tokens )

    A preempted request keeps its tokens and loses its blocks: `num_computed_tokens` is 0 again,
    and `num_computed_before` tells how many of them had been computed at most.
    `lane`: whose blocks these are; None while it waits, the last one when it has finished.
    `seed` is always set (drawn at arrival if the client gave none), so a preempted request
    goes on with the numbers it would have had. `max_tokens` is clamped to the context.
    `num_routes`: positions, from the first on, whose routes were kept, where they are wanted;
    those in `untold_routes` wait for the next update.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    priority: int = 0
    arrival_time: float = 0.0
    arrival_index: int = 0

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    block_ids: MutableSequence[int] = dataclasses.field(default_factory=no_blocks)
    lane: int | None = None
    num_computed_tokens: int = 0
    num_computed_before: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    untold_routes: list[TokenRoutes] = dataclasses.field(default_factory=list)
    num_routes: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0

    @classmethod
    def from_message(
        cls, message: AddRequest, *, max_tokens: int, seed: int, arrival_index: int
    ) -> Request:
        return cls(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling=message.sampling,
            max_tokens=max_tokens,
            seed=seed,
            priority=message.priority,
            arrival_time=message.arrival_time,
            arrival_index=arrival_index,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Known tokens that are still to be computed."""
        num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return num_known - self.num_computed_tokens

    @property
    def queue_key(self) -> tuple[int, int]:
        """Lower runs sooner: priority, then order of arrival."""
        return (self.priority, self.arrival_index)

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop), prompt and output as one sequence."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]
