"""How the ranks of a lane learn what to compute: requests whole once, then only what changed.

    rank 0:  plan -> StepEncoder -> one StepMessage a lane
    others:            StepMessage -> StepDecoder -> their lane's part of the plan

Plain values; how they travel is for others to know.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from moe_serve.request import Request, RequestStatus
from moe_serve.sampling_params import SamplingParams
from moe_serve.step import Chunk, StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What never changes of a request. Its output and blocks so far come with its chunk."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    seed: int


class ChunkNews(NamedTuple):
    """One chunk, and what its request got since it was last told of in this lane.

    A tuple, since it travels without the names of its fields: most messages are little else.
    """

    request_id: str
    start: int
    num_tokens: int
    num_recomputed: int
    output_token_ids: list[int]
    block_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """One lane's part of a step. To be applied in this order, since an id can be used again:

    - `dropped_ids`: requests that ended or were preempted.
    - `new_requests`: those that the lane does not know.
    - `chunks`: in the order of the plan; none if the lane idles.

    `num_tokens_of_lanes` and `records_routes`: as in `StepPlan`.
    """

    lane: int
    num_tokens_of_lanes: list[int]
    dropped_ids: list[str]
    new_requests: list[NewRequest]
    chunks: list[ChunkNews]
    records_routes: bool = False


@dataclasses.dataclass(slots=True)
class _Told:
    """How much of a request a lane has been told."""

    request: Request
    num_preemptions: int
    num_output_tokens: int = 0
    num_blocks: int = 0

    @property
    def is_current(self) -> bool:
        """Whether it has run on without a break: the lane is the same, its blocks only grew."""
        request = self.request
        is_running = request.status is RequestStatus.RUNNING
        return is_running and request.num_preemptions == self.num_preemptions


class StepEncoder:
    """Makes the messages of each step. Nobody tells it of endings and preemptions: it sees them on
    the requests, drops them with the next message, and forgets them then.

    Each message must reach the lane's decoders, in order.
    """

    def __init__(self, num_lanes: int) -> None:
        self._told: list[dict[str, _Told]] = [{} for _ in range(num_lanes)]

    @property
    def num_known(self) -> int:
        """Requests that are kept track of, over all lanes."""
        return sum(map(len, self._told))

    def encode(self, plan: StepPlan) -> list[StepMessage]:
        """One message a lane, for idle ones too. To be called before the plan is run."""
        assert plan.num_lanes == len(self._told)
        return [self._encode_lane(plan.of_lane(lane), lane) for lane in range(plan.num_lanes)]

    def _encode_lane(self, plan: StepPlan, lane: int) -> StepMessage:
        told = self._told[lane]
        dropped_ids = [request_id for request_id, known in told.items() if not known.is_current]
        for request_id in dropped_ids:
            del told[request_id]
        new = [chunk.request for chunk in plan.chunks if chunk.request.request_id not in told]
        for request in new:
            told[request.request_id] = _Told(request, request.num_preemptions)
        return StepMessage(
            lane=lane,
            num_tokens_of_lanes=list(plan.num_tokens_of_lanes),
            dropped_ids=dropped_ids,
            new_requests=[_introduce(request) for request in new],
            chunks=[_tell(chunk, told[chunk.request.request_id]) for chunk in plan.chunks],
            records_routes=plan.records_routes,
        )


def _introduce(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        seed=request.seed,
    )


def _tell(chunk: Chunk, told: _Told) -> ChunkNews:
    request = chunk.request
    news = ChunkNews(
        request.request_id,
        chunk.start,
        chunk.num_tokens,
        chunk.num_recomputed,
        request.output_token_ids[told.num_output_tokens :],
        list(request.block_ids[told.num_blocks :]),
    )
    told.num_output_tokens = request.num_output_tokens
    told.num_blocks = len(request.block_ids)
    return news


class StepDecoder:
    """Keeps mirrors of the requests that run in one lane, and plans that refer to them.

    A mirror has what running a chunk takes: tokens, sampling, seed, `max_tokens`, blocks, lane.
    The scheduler's own notes (priority, times, counts) stay at their defaults.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    @property
    def request_ids(self) -> list[str]:
        """Ids of the mirrored requests."""
        return list(self._requests)

    def decode(self, message: StepMessage) -> StepPlan:
        """The lane's part of the plan. Its requests change with the next message."""
        for request_id in message.dropped_ids:
            del self._requests[request_id]
        for new in message.new_requests:
            assert new.request_id not in self._requests, f"{new.request_id} came twice"
            self._requests[new.request_id] = Request(
                request_id=new.request_id,
                prompt_token_ids=new.prompt_token_ids,
                sampling=new.sampling,
                max_tokens=new.max_tokens,
                seed=new.seed,
                status=RequestStatus.RUNNING,
                lane=message.lane,
            )
        return StepPlan(
            chunks=tuple(self._hear(news) for news in message.chunks),
            num_tokens_of_lanes=tuple(message.num_tokens_of_lanes),
            records_routes=message.records_routes,
        )

    def _hear(self, news: ChunkNews) -> Chunk:
        request = self._requests[news.request_id]
        request.output_token_ids += news.output_token_ids
        request.block_ids.extend(news.block_ids)
        return Chunk(
            request=request,
            start=news.start,
            num_tokens=news.num_tokens,
            num_recomputed=news.num_recomputed,
        )
