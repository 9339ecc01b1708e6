"""Records which experts each token chose, while it is on. Pure."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_serve.errors import RecordingError
from moe_serve.experts.recording import DECODE, PREFILL, RECOMPUTED, RouteRecording
from moe_serve.step import Chunk, ChunkResult, StepPlan
from moe_serve.token_routes import TokenRoutes

logger = logging.getLogger(__name__)

# Shapes: T tokens.

# About 200 MB for 48 layers of 8 experts a token.
MAX_TOKENS = 2**18


@dataclasses.dataclass(slots=True)
class _Recorded:
    """Of one request, in order: tokens computed for the first time, and those computed again."""

    first: list[TokenRoutes] = dataclasses.field(default_factory=list)
    again: list[TokenRoutes] = dataclasses.field(default_factory=list)
    num_prefill: int = 0

    def add(self, chunk: Chunk, routes: TokenRoutes) -> None:
        num_again = chunk.num_recomputed
        if num_again:
            self.again.append(routes.between(0, num_again))
        if num_again < chunk.num_tokens:
            self.first.append(routes.between(num_again, chunk.num_tokens))
        self.num_prefill += chunk.phase_lengths[PREFILL]

    @property
    def phases_T(self) -> npt.NDArray[np.int8]:
        num_first = sum(part.num_tokens for part in self.first)
        num_again = sum(part.num_tokens for part in self.again)
        lengths = [self.num_prefill, num_first - self.num_prefill, num_again]
        return np.repeat(np.array([PREFILL, DECODE, RECOMPUTED], dtype=np.int8), lengths)


class RouteRecorder:
    """Takes in the steps between `start` and `stop`: all that they computed, and nothing else.

    What a request computed before, or had from the prefix cache, is not there. Tokens that were
    computed again after a preemption are kept too, behind the request's others: so the counts of a
    recording are those of the load counters over the same steps, phase by phase.

    A step is taken in whole or not at all. The first one that would make more than `max_tokens`
    ends the recording, and `is_full` tells.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.is_recording = False
        self.is_full = False
        self.num_tokens = 0
        # By id and arrival: an id may come back when its request has ended.
        self._requests: dict[tuple[str, int], _Recorded] = {}

    def start(self) -> None:
        """Forget what was recorded, and record anew."""
        self.is_recording, self.is_full = True, False
        self.num_tokens = 0
        self._requests = {}

    def stop(self) -> None:
        self.is_recording = False

    def observe(self, plan: StepPlan, results: Sequence[ChunkResult]) -> None:
        """Take in a step, before the scheduler does. Off, or when the step was planned with
        `records_routes` off, it does nothing.
        """
        if not self.is_recording or not plan.records_routes:
            return
        if self.num_tokens + plan.num_tokens > self.max_tokens:
            self.is_recording, self.is_full = False, True
            logger.warning(
                "recording of routes ended: %d tokens are recorded, and the next step would make "
                "more than %d",
                self.num_tokens,
                self.max_tokens,
            )
            return
        self.num_tokens += plan.num_tokens
        for chunk, result in zip(plan.chunks, results, strict=True):
            assert result.routes is not None, f"no routes of {chunk.request.request_id}"
            key = (chunk.request.request_id, chunk.request.arrival_index)
            self._requests.setdefault(key, _Recorded()).add(chunk, result.routes)

    def recording(self, model: str, num_experts: int) -> RouteRecording:
        """What was recorded so far: requests in order of their first recorded step.

        Raises `RecordingError` if that is nothing.
        """
        if not self._requests:
            raise RecordingError("routes: no token was computed while they were recorded")
        requests = list(self._requests.values())
        ids = TokenRoutes.join([part for one in requests for part in (*one.first, *one.again)])
        phases = [one.phases_T for one in requests]
        return RouteRecording(
            model=model,
            num_experts=num_experts,
            ids_TLK=ids.ids_TLK,
            request_lengths=tuple(map(len, phases)),
            phases_T=np.concatenate(phases),
        )
