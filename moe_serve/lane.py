"""One data-parallel attention lane: its running requests, its blocks, its part of each step."""

from __future__ import annotations

import collections

from moe_serve.block_manager import BlockManager
from moe_serve.lane_choice import LaneOffer
from moe_serve.request import Request, RequestStatus
from moe_serve.request_queue import RequestQueue
from moe_serve.step import Chunk


class Lane:
    """`max_num_running` requests and `max_num_batched_tokens` tokens a step are its limits.

    A step is `plan_running`, then any number of `admit`, then `take_chunks`.
    """

    def __init__(
        self,
        index: int,
        block_manager: BlockManager,
        *,
        max_num_running: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.index = index
        self.block_manager = block_manager
        self.running = RequestQueue()
        self._max_num_running = max_num_running
        self._max_num_batched_tokens = max_num_batched_tokens
        # Of the step that is being planned.
        self._chunks: list[Chunk] = []
        self._budget = 0
        self._preempted: list[Request] = []

    def plan_running(self) -> list[Request]:
        """Begin a step with the decodes, then the prompts begun. Returns the requests that were
        preempted for them; these wait again."""
        self._chunks, self._preempted = [], []
        self._budget = self._max_num_batched_tokens
        begun = []
        for request in list(self.running):
            # One that comes later in the order may have been preempted meanwhile.
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.num_tokens_left > 1:
                begun.append(request)
            elif self._grow(request):
                self._plan(request)
        for request in begun:
            if self._budget and request.status is RequestStatus.RUNNING:
                self._plan(request)
        return self._preempted

    def _grow(self, request: Request) -> bool:
        """Get a slot for the newest token; False if the request was preempted instead."""
        manager = self.block_manager
        if manager.has_slot(request):
            return True
        while not manager.can_append(request):
            victim = self.running.last
            self._preempt(victim)
            if victim is request:
                return False
        manager.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        request.num_computed_before = max(request.num_computed_before, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.lane = None
        request.status = RequestStatus.WAITING
        self._preempted.append(request)

    def _plan(self, request: Request) -> None:
        num_tokens = min(self._budget, request.num_tokens_left)
        self._budget -= num_tokens
        start = request.num_computed_tokens
        num_recomputed = min(start + num_tokens, request.num_computed_before) - start
        self._chunks.append(
            Chunk(
                request=request,
                start=start,
                num_tokens=num_tokens,
                num_recomputed=max(0, num_recomputed),
            )
        )

    def can_admit(self, request: Request) -> bool:
        """Whether it fits into the lane and into this step. Not where one was preempted."""
        if self._preempted or not self._budget or len(self.running) >= self._max_num_running:
            return False
        num_spare_blocks = -(-len(self.running) // self.block_manager.block_size)
        return self.block_manager.can_admit(request, num_spare_blocks)

    def offer(self, request: Request) -> LaneOffer:
        num_hits = len(self.block_manager.find_prefix(request))
        return LaneOffer(
            lane=self.index,
            num_cached_tokens=num_hits * self.block_manager.block_size,
            num_running=len(self.running),
            num_tokens_left=sum(other.num_tokens_left for other in self.running),
        )

    def admit(self, request: Request) -> int:
        """Run the request from this step on; returns how many of its tokens were cached."""
        num_cached = self.block_manager.admit(request)
        request.lane = self.index
        request.status = RequestStatus.RUNNING
        self.running.add(request)
        self._plan(request)
        return num_cached

    def take_chunks(self) -> list[Chunk]:
        """The step's chunks. The sort is stable: order of rank within the two kinds."""
        chunks, self._chunks = self._chunks, []
        return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)

    def remove(self, request: Request) -> None:
        """Take out a running request and free its blocks."""
        self.running.remove(request)
        self.block_manager.release(request)

    def forget(self, request: Request) -> None:
        """Drop what was noted of its prefix while it was looked for here, by a request that owns
        nothing here."""
        assert not request.block_ids
        self.block_manager.release(request)

    def check_integrity(self) -> None:
        """Assert that each block is owned by exactly the running requests that list it."""
        self.block_manager.check_integrity()
        num_owners = collections.Counter[int]()
        for request in self.running:
            assert request.status is RequestStatus.RUNNING and request.lane == self.index
            assert len(set(request.block_ids)) == len(request.block_ids)
            num_owners.update(request.block_ids)
            self.block_manager.check_request(request)
        for block_id in range(self.block_manager.num_blocks):
            assert self.block_manager.num_references(block_id) == num_owners[block_id]
