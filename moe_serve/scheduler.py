"""Chooses what each engine step computes, and applies what came back."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from moe_serve.block_manager import BlockManager
from moe_serve.errors import ContextLengthError, LogitsError, RequestError
from moe_serve.lane import Lane
from moe_serve.lane_choice import choose_lane
from moe_serve.messages import AddRequest, EngineStats, RequestUpdate
from moe_serve.request import Request, RequestStatus
from moe_serve.request_news import collect_prompt_logprobs, collect_routes, make_update
from moe_serve.request_queue import WaitingQueue
from moe_serve.step import Chunk, ChunkResult, StepPlan
from moe_serve.stopping import find_ending


def random_seed() -> int:
    return secrets.randbits(63)


@dataclasses.dataclass(slots=True)
class _Counters:
    """See `EngineStats`."""

    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_recomputed_tokens: int = 0


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recompute, over several lanes.

        add -> waiting -> schedule: admitted -> running in a lane -> update: finished -> gone
                  ^                                  |
                  +------------ preempted -----------+

    Each lane has a pool of blocks and running requests of its own; those that wait, wait
    together. A request gets a lane when it is admitted (`choose_lane`) and stays there until it
    ends or is preempted; then it may come back in another one. The limits are those of a lane.

    One step is `schedule()`, the model, `update(plan, results)`. `add`, `abort` and `fail` may
    come before or after the model runs, but not while it still has to read the plan.
    Why nothing starves:

    - At most min(max_num_seqs, max_num_batched_tokens) requests run at once in a lane, so every
      running decode gets its token in every step, whatever the prompts want.
    - A request gets the blocks for all its known tokens when it is admitted. Only decodes grow.
      One that finds no free block preempts the running request of its lane that is last in
      `queue_key` order, perhaps itself, so the first one of a lane is never preempted by another;
      and alone in a lane it always fits, since max_model_len is at most the size of each pool.
    - A preempted request needs at least what it gave up, of which the older one has taken a part:
      it cannot come back to that lane before another one there ends or is preempted. Going to
      another lane it meets the same rule there. Nothing is admitted to a lane in a step in which
      it preempts, and admission leaves as many blocks free as the running requests take in a step
      on average, so that it does not cause the next preemption.
    - Waiting requests are overtaken a bounded number of times (see `WaitingQueue`), whatever the
      lanes: after that nothing behind them is admitted anywhere, so that the lanes run empty
      until they fit into one.
    """

    def __init__(
        self,
        block_managers: BlockManager | Sequence[BlockManager],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.time,
        seed_source: Callable[[], int] = random_seed,
    ) -> None:
        """One block manager a lane; a single one stands for one lane."""
        if isinstance(block_managers, BlockManager):
            block_managers = [block_managers]
        assert block_managers and max_num_seqs > 0 and max_num_batched_tokens > 0
        for manager in block_managers:
            assert max_model_len <= manager.num_blocks * manager.block_size
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._clock = clock
        self._seed_source = seed_source
        self.lanes = tuple(
            Lane(
                index,
                manager,
                max_num_running=self.max_num_running,
                max_num_batched_tokens=max_num_batched_tokens,
            )
            for index, manager in enumerate(block_managers)
        )
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._num_arrivals = 0
        self._counters = _Counters()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._requests)

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never run or its id is in use."""
        num_prompt = len(message.prompt_token_ids)
        if message.request_id in self._requests:
            raise RequestError(
                f"request_id {message.request_id!r} is in use by an unfinished request",
                param="request_id",
            )
        if not num_prompt:
            raise RequestError("prompt has 0 tokens; at least 1 is needed", param="prompt")
        if num_prompt >= self.max_model_len:
            raise ContextLengthError(
                f"prompt has {num_prompt} tokens; the context holds {self.max_model_len}, "
                f"so a prompt may have at most {self.max_model_len - 1}",
                param="prompt",
            )
        request = self._make_request(message, self.max_model_len - num_prompt)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def _make_request(self, message: AddRequest, max_tokens: int) -> Request:
        sampling = message.sampling
        if sampling.max_tokens is not None:
            max_tokens = min(max_tokens, sampling.max_tokens)
        request = Request.from_message(
            message,
            max_tokens=max_tokens,
            seed=self._seed_source() if sampling.seed is None else sampling.seed,
            arrival_index=self._num_arrivals,
        )
        if sampling.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self._num_arrivals += 1
        return request

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget these requests and free their blocks now; returns the ids that were known."""
        requests = [self._requests.get(request_id) for request_id in dict.fromkeys(request_ids)]
        known = [request for request in requests if request is not None]
        for request in known:
            self._remove(request)
        return [request.request_id for request in known]

    def fail(self, request_id: str, error: LogitsError) -> RequestUpdate:
        """End one unfinished request with an error and free its blocks now."""
        request = self._requests[request_id]
        self._remove(request)
        return make_update(request, finish_reason="error", error=error)

    def _remove(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._lane_of(request).remove(request)
        else:
            self._waiting.remove(request)
            for lane in self.lanes:
                lane.forget(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _lane_of(self, request: Request) -> Lane:
        assert request.lane is not None, f"{request.request_id} has no lane"
        return self.lanes[request.lane]

    def schedule(self, records_routes: bool = False) -> StepPlan | None:
        """What to compute now: decodes, then prompts begun, then new ones. None: nothing to do.

        In each lane at most `max_num_batched_tokens` tokens, of `max_num_running` requests.
        `records_routes`: somebody beside the requests themselves wants to know all routes.
        """
        for lane in self.lanes:
            for request in lane.plan_running():
                self._waiting.add(request)
                self._counters.num_preemptions += 1
        while (newcomer := self._waiting.pop_first(self._fits)) is not None:
            self._admit(newcomer)
        plan = StepPlan.join([lane.take_chunks() for lane in self.lanes], records_routes)
        self._counters.num_scheduled_tokens = plan.num_tokens
        return plan if plan.chunks else None

    def _fits(self, request: Request) -> bool:
        return any(lane.can_admit(request) for lane in self.lanes)

    def _admit(self, request: Request) -> None:
        lane = self._choose_lane(request)
        for other in self.lanes:
            if other is not lane:
                other.forget(request)
        num_cached = lane.admit(request)
        if request.num_preemptions:
            return
        request.scheduled_time = self._clock()
        request.num_cached_tokens = num_cached
        if lane.block_manager.can_use_prefix(request):
            self._counters.prefix_cache_queries += request.num_tokens
            self._counters.prefix_cache_hits += num_cached

    def _choose_lane(self, request: Request) -> Lane:
        candidates = [lane for lane in self.lanes if lane.can_admit(request)]
        if len(candidates) == 1:
            return candidates[0]
        return self.lanes[choose_lane([lane.offer(request) for lane in candidates])]

    def update(self, plan: StepPlan, results: Sequence[ChunkResult]) -> list[RequestUpdate]:
        """Apply the results, one for each chunk of the plan, in order; returns the news.

        Chunks of requests that have been aborted or failed since `schedule` are skipped.
        """
        now = self._clock()
        updates = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            if self._requests.get(chunk.request.request_id) is chunk.request:
                update = self._apply(chunk, result, now)
                if update is not None:
                    updates.append(update)
        return updates

    def _apply(self, chunk: Chunk, result: ChunkResult, now: float) -> RequestUpdate | None:
        request = chunk.request
        # Whether the chunk is the last one depends on the tokens known before this result.
        is_last = chunk.is_last
        samples = is_last and request.max_tokens > 0
        self._advance(chunk)
        prompt_logprobs = None
        if request.prompt_logprobs is not None:
            prompt_logprobs = collect_prompt_logprobs(chunk, result.prompt_logprobs or [])
        if request.sampling.return_routed_experts:
            collect_routes(chunk, result.routes)
        if samples:
            assert result.sampled is not None, f"no token for {request.request_id}"
            request.output_token_ids.append(result.sampled.token_id)
            request.first_token_time = request.first_token_time or now
        ending = find_ending(request, self.eos_token_ids) if is_last else None
        if ending is not None:
            self._remove(request)
        if not samples and ending is None and prompt_logprobs is None:
            return None
        return make_update(
            request,
            sampled=result.sampled if samples else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=ending.reason if ending else None,
            stop_reason=ending.stop_reason if ending else None,
        )

    def _advance(self, chunk: Chunk) -> None:
        request = chunk.request
        assert chunk.start == request.num_computed_tokens, f"{request.request_id}: stale plan"
        self._counters.num_recomputed_tokens += chunk.num_recomputed
        request.num_computed_tokens = chunk.stop
        self._lane_of(request).block_manager.cache_computed(request)

    @property
    def _num_running(self) -> int:
        return sum(len(lane.running) for lane in self.lanes)

    def stats(self) -> EngineStats:
        managers = [lane.block_manager for lane in self.lanes]
        num_free = sum(manager.num_free_blocks for manager in managers)
        counters = self._counters
        return EngineStats(
            num_running=self._num_running,
            num_waiting=len(self._waiting),
            kv_cache_usage=1 - num_free / sum(manager.num_blocks for manager in managers),
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_preemptions=counters.num_preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_recomputed_tokens=counters.num_recomputed_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that each request is in one place, and each block owned by those that list it."""
        for lane in self.lanes:
            lane.check_integrity()
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING and request.lane is None
            assert not request.block_ids and not request.num_computed_tokens
        queues = [self._waiting, *(lane.running for lane in self.lanes)]
        queued = {request.request_id for queue in queues for request in queue}
        assert queued == self._requests.keys()
        assert sum(map(len, queues)) == len(self._requests)
