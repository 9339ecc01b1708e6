"""Chooses what each engine step computes, and applies what came back."""

from __future__ import annotations

import collections
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from moe_serve.block_manager import BlockManager
from moe_serve.errors import ContextLengthError, LogitsError, RequestError
from moe_serve.messages import AddRequest, EngineStats, RequestUpdate
from moe_serve.request import Request, RequestStatus
from moe_serve.request_news import collect_prompt_logprobs, make_update
from moe_serve.request_queue import RequestQueue, WaitingQueue
from moe_serve.step import Chunk, ChunkResult, StepPlan
from moe_serve.stopping import find_ending


def random_seed() -> int:
    return secrets.randbits(63)


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recompute.

        add -> waiting -> schedule: admitted -> running -> update: finished -> gone
                  ^                                |
                  +---------- preempted -----------+

    One step is `schedule()`, the model, `update(plan, results)`. `add`, `abort` and `fail` may
    come before or after the model runs, but not while it still has to read the plan.
    Why nothing starves:

    - At most min(max_num_seqs, max_num_batched_tokens) requests run at once, so every running
      decode gets its token in every step, whatever the prompts want.
    - A request gets the blocks for all its known tokens when it is admitted. Only decodes grow.
      One that finds no free block preempts the running request that is last in `queue_key` order,
      perhaps itself, so the first one is never preempted by another; and alone it always fits,
      since max_model_len is at most the size of the pool.
    - A preempted request needs at least what it gave up, of which the older one has taken a part:
      it cannot come back before another request ends or is preempted. Nothing is admitted in a
      step with a preemption, and admission leaves as many blocks free as the running requests
      take in a step on average, so that it does not cause the next preemption.
    - Waiting requests are overtaken a bounded number of times (see `WaitingQueue`).
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.time,
        seed_source: Callable[[], int] = random_seed,
    ) -> None:
        assert max_num_seqs > 0 and max_num_batched_tokens > 0
        assert max_model_len <= block_manager.num_blocks * block_manager.block_size
        self.block_manager = block_manager
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._clock = clock
        self._seed_source = seed_source
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running = RequestQueue()
        # Of preempted requests: how many tokens had been computed at most.
        self._num_computed_before: dict[str, int] = {}
        self._num_arrivals = 0
        self._counters = EngineStats()

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
        queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
        queue.remove(request)
        request.status = RequestStatus.FINISHED
        self.block_manager.release(request)
        self._num_computed_before.pop(request.request_id, None)
        del self._requests[request.request_id]

    def schedule(self) -> StepPlan | None:
        """What to compute now: decodes, then prompts begun, then new ones. None: nothing to do.

        At most `max_num_batched_tokens` tokens, of `max_num_running` requests.
        """
        num_preemptions = self._counters.num_preemptions
        chunks = self._plan_decodes()
        budget = self.max_num_batched_tokens - len(chunks)
        for request in self._running:
            if budget and _num_to_compute(request) > 1:
                chunks.append(_next_chunk(request, budget))
                budget -= chunks[-1].num_tokens
        if self._counters.num_preemptions == num_preemptions:
            chunks += self._plan_admissions(budget)
        # The sort is stable: order of rank within the two kinds.
        plan = StepPlan(chunks=tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)))
        self._count(num_scheduled_tokens=plan.num_tokens)
        return plan if plan.chunks else None

    def _plan_decodes(self) -> list[Chunk]:
        chunks = []
        for request in list(self._running):
            # One that comes later in the order may have been preempted meanwhile.
            is_running = request.status is RequestStatus.RUNNING
            if is_running and _num_to_compute(request) == 1 and self._grow(request):
                chunks.append(_next_chunk(request, 1))
        return chunks

    def _grow(self, request: Request) -> bool:
        """Get a slot for the newest token; False if the request was preempted instead."""
        while not self.block_manager.can_append(request):
            victim = self._running.last
            self._preempt(victim)
            if victim is request:
                return False
        self.block_manager.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        self._num_computed_before[request.request_id] = max(
            request.num_computed_tokens, self._num_computed_before.get(request.request_id, 0)
        )
        self._running.remove(request)
        self.block_manager.release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self._waiting.add(request)
        self._count(num_preemptions=self._counters.num_preemptions + 1)

    def _plan_admissions(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while budget and len(self._running) < self.max_num_running:
            request = self._waiting.pop_first(self._fits)
            if request is None:
                break
            self._admit(request)
            chunks.append(_next_chunk(request, budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def _fits(self, request: Request) -> bool:
        num_spare_blocks = -(-len(self._running) // self.block_manager.block_size)
        return self.block_manager.can_admit(request, num_spare_blocks)

    def _admit(self, request: Request) -> None:
        num_cached = self.block_manager.admit(request)
        request.status = RequestStatus.RUNNING
        self._running.add(request)
        if request.num_preemptions:
            return
        request.scheduled_time = self._clock()
        request.num_cached_tokens = num_cached
        if self.block_manager.can_use_prefix(request):
            self._count(
                prefix_cache_queries=self._counters.prefix_cache_queries + request.num_tokens,
                prefix_cache_hits=self._counters.prefix_cache_hits + num_cached,
            )

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
        is_last, samples = chunk.is_last, chunk.samples
        self._advance(chunk)
        prompt_logprobs = collect_prompt_logprobs(chunk, result.prompt_logprobs or [])
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
        num_before = self._num_computed_before.get(request.request_id, 0)
        num_again = min(chunk.stop, num_before) - chunk.start
        if num_again > 0:
            self._count(num_recomputed_tokens=self._counters.num_recomputed_tokens + num_again)
        request.num_computed_tokens = chunk.stop
        self.block_manager.cache_computed(request)

    def _count(self, **values: int) -> None:
        self._counters = dataclasses.replace(self._counters, **values)

    def stats(self) -> EngineStats:
        return dataclasses.replace(
            self._counters,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self.block_manager.usage,
        )

    def check_integrity(self) -> None:
        """Assert that each block is owned by exactly the running requests that list it."""
        self.block_manager.check_integrity()
        num_owners = collections.Counter[int]()
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert len(set(request.block_ids)) == len(request.block_ids)
            num_owners.update(request.block_ids)
            self.block_manager.check_request(request)
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING
            assert not request.block_ids and not request.num_computed_tokens
        for block_id in range(self.block_manager.num_blocks):
            assert self.block_manager.num_references(block_id) == num_owners[block_id]
        queued = {request.request_id for queue in (self._running, self._waiting)
                  for request in queue}  # fmt: skip
        assert queued == self._requests.keys()
        assert len(self._running) + len(self._waiting) == len(self._requests)


def _num_to_compute(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


def _next_chunk(request: Request, budget: int) -> Chunk:
    num_tokens = min(budget, _num_to_compute(request))
    return Chunk(request=request, start=request.num_computed_tokens, num_tokens=num_tokens)
