"""A scheduler with a model that proves, for every chunk, that its blocks hold the right past."""

from __future__ import annotations

import numpy as np
import pytest

from moe_serve.block_manager import BlockManager
from moe_serve.lane import Lane
from moe_serve.messages import AddRequest, RequestUpdate, TokenLogprobs
from moe_serve.request import Request, RequestStatus
from moe_serve.sampling_params import SamplingParams
from moe_serve.scheduler import Scheduler
from moe_serve.step import Chunk, ChunkResult, SampledToken, StepPlan
from moe_serve.token_routes import TokenRoutes

VOCAB_SIZE = 97
EOS = 0


def next_token(token_ids: list[int]) -> int:
    """Depends on every token so far, and on their order."""
    value = len(token_ids)
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return value % VOCAB_SIZE


def expected_outputs(prompt, sampling: SamplingParams, max_model_len: int) -> list[int]:
    """What the request gets when it is alone in the world."""
    room = max_model_len - len(prompt)
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    outputs: list[int] = []
    while len(outputs) < limit:
        outputs.append(next_token([*prompt, *outputs]))
        is_eos = outputs[-1] == EOS and not sampling.ignore_eos
        may_stop = len(outputs) >= sampling.min_tokens
        if may_stop and (is_eos or outputs[-1] in sampling.stop_token_ids):
            break
    return outputs


class FakeEngine:
    """Runs plans on a paged memory, one a lane, in which a slot holds a digest of all tokens up
    to it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.managers = [lane.block_manager for lane in scheduler.lanes]
        # By (lane, slot).
        self.memory: dict[tuple[int, int], int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list] = {}
        self.routes: dict[str, list[TokenRoutes]] = {}
        self.endings: dict[str, RequestUpdate] = {}
        self.start_steps: dict[str, int] = {}
        self.num_computed: dict[str, int] = {}
        self.num_preemptions: dict[str, int] = {}
        self.num_recomputed = 0
        self._reached: dict[Request, int] = {}
        self.num_steps = 0

    @property
    def manager(self) -> BlockManager:
        """That of the only lane."""
        (manager,) = self.managers
        return manager

    def add(self, request_id: str, prompt, *, priority: int = 0, **sampling) -> None:
        sampling.setdefault("ignore_eos", True)
        sampling.setdefault("temperature", 0.0)
        self.scheduler.add(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(**sampling),
                priority=priority,
            )
        )

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.finish_step(plan, self.run(plan))
        return plan

    def plan(self) -> StepPlan | None:
        before = [
            {request: request.num_preemptions for request in lane.running}
            for lane in self.scheduler.lanes
        ]
        plan = self.scheduler.schedule()
        self._check(plan)
        for lane, ran in zip(self.scheduler.lanes, before, strict=True):
            stayed = {request for request, count in ran.items() if request.num_preemptions == count}
            assert len(stayed) == len(ran) or stayed == set(lane.running), "admitted and preempted"
            assert not ran or next(iter(ran)) in stayed, "the first was preempted"
        return plan

    def _check(self, plan: StepPlan | None) -> None:
        self.scheduler.check_integrity()
        assert (plan is not None) == self.scheduler.has_work
        if plan is None:
            return
        assert plan.num_tokens == sum(plan.num_tokens_of_lanes) > 0
        assert len({chunk.request.request_id for chunk in plan.chunks}) == len(plan.chunks)
        parts = [plan.of_lane(lane.index) for lane in self.scheduler.lanes]
        assert plan.chunks == tuple(chunk for part in parts for chunk in part.chunks)
        assert plan.num_tokens_of_lanes == tuple(part.num_tokens for part in parts)
        for lane, part in zip(self.scheduler.lanes, parts, strict=True):
            self._check_lane(lane, part)

    def _check_lane(self, lane: Lane, part: StepPlan) -> None:
        assert part.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(lane.running) <= self.scheduler.max_num_running
        assert all(chunk.num_tokens > 0 for chunk in part.chunks)
        is_long = [chunk.num_tokens > 1 for chunk in part.chunks]
        assert is_long == sorted(is_long)
        computed = {chunk.request for chunk in part.chunks}
        # All decodes, and the first of the lane whatever it is.
        assert {request for request in lane.running if request.num_tokens_left == 1} <= computed
        assert not lane.running or next(iter(lane.running)) in computed

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        self.num_steps += 1
        # All write before any reads, as the layers of a model do.
        for chunk in plan.chunks:
            digests = self._digests(chunk.request, chunk.stop)
            for position in range(chunk.start, chunk.stop):
                self.memory[self._slot(chunk.request, position)] = digests[position]
        return [self._result(chunk, plan.records_routes) for chunk in plan.chunks]

    def _result(self, chunk: Chunk, records_routes: bool) -> ChunkResult:
        request = chunk.request
        self.start_steps.setdefault(request.request_id, self.num_steps)
        self.num_preemptions[request.request_id] = request.num_preemptions
        num_computed = self.num_computed.get(request.request_id, 0) + chunk.num_tokens
        self.num_computed[request.request_id] = num_computed
        seen = [self.memory[self._slot(request, p)] for p in range(chunk.stop)]
        assert seen == self._digests(request, chunk.stop), "a slot holds another past"
        tokens = request.tokens_between(0, chunk.stop)
        sampled = SampledToken(token_id=next_token(tokens)) if chunk.samples else None
        entries = None
        if request.sampling.prompt_logprobs is not None:
            stop = min(chunk.stop + 1, request.num_prompt_tokens)
            entries = [self.entry(request, p) for p in range(chunk.start + 1, stop)]
        routes = self.routes_of(tokens).between(chunk.start, chunk.stop) if records_routes else None
        return ChunkResult(sampled=sampled, prompt_logprobs=entries, routes=routes)

    @staticmethod
    def routes_of(tokens: list[int]) -> TokenRoutes:
        """Two layers, one expert each: the token, and its position."""
        ids = np.array([*tokens, *range(len(tokens))], dtype=np.int16)
        return TokenRoutes.of(ids.reshape(2, -1, 1).swapaxes(0, 1))

    @staticmethod
    def entry(request: Request, position: int) -> TokenLogprobs:
        return TokenLogprobs(
            token_id=request.prompt_token_ids[position],
            logprob=-float(position),
            rank=1,
            top_token_ids=[],
            top_logprobs=[],
        )

    def finish_step(self, plan: StepPlan, results: list[ChunkResult]) -> None:
        for chunk in plan.chunks:
            if chunk.request.status is RequestStatus.RUNNING:
                reached = self._reached.get(chunk.request, 0)
                self.num_recomputed += max(0, min(chunk.stop, reached) - chunk.start)
                self._reached[chunk.request] = max(chunk.stop, reached)
        for update in self.scheduler.update(plan, results):
            self.record(update)
        self.scheduler.check_integrity()
        assert self.scheduler.stats().num_recomputed_tokens == self.num_recomputed

    def record(self, update: RequestUpdate) -> None:
        request_id = update.request_id
        assert request_id not in self.endings, "news after the end"
        self.outputs.setdefault(request_id, []).extend(update.token_ids)
        if update.prompt_logprobs is not None:
            assert request_id not in self.prompt_logprobs, "prompt logprobs told twice"
            self.prompt_logprobs[request_id] = update.prompt_logprobs
        if update.routes is not None:
            self.routes.setdefault(request_id, []).append(update.routes)
        if update.finish_reason is not None:
            self.endings[request_id] = update

    def check_routes(self, request_id: str, prompt, *, are_wanted: bool) -> None:
        """That those of each computed token of a request that ended came, once."""
        parts = self.routes.pop(request_id, [])
        assert bool(parts) == are_wanted
        if are_wanted:
            tokens = [*prompt, *self.outputs[request_id][:-1]]
            assert TokenRoutes.join(parts) == self.routes_of(tokens)

    def drain(self, max_steps: int = 5000) -> None:
        """Step until nothing is left; a livelock fails."""
        for _ in range(max_steps):
            if self.step() is None:
                break
        assert not self.scheduler.has_work, "no end in sight"
        for manager in self.managers:
            assert manager.num_free_blocks == manager.num_blocks, "blocks leaked"
            assert not manager._chains, "notes on requests leaked"

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        block_size = self.managers[request.lane].block_size
        block, offset = divmod(position, block_size)
        return request.lane, request.block_ids[block] * block_size + offset

    @staticmethod
    def _digests(request: Request, stop: int) -> list[int]:
        digests, value = [], 0
        for token_id in request.tokens_between(0, stop):
            value = hash((value, token_id))
            digests.append(value)
        return digests


def make_engine(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    num_lanes: int = 1,
    enable_prefix_caching: bool = True,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    max_model_len: int | None = None,
    **options,
) -> FakeEngine:
    managers = [
        BlockManager(num_blocks, block_size, enable_prefix_caching) for _ in range(num_lanes)
    ]
    return FakeEngine(
        Scheduler(
            managers,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len or num_blocks * block_size,
            eos_token_ids=frozenset({EOS}),
            **options,
        )
    )


@pytest.fixture(name="make_engine")
def make_engine_fixture():
    return make_engine


@pytest.fixture(name="expected_outputs")
def expected_outputs_fixture():
    """(prompt, sampling, max_model_len) -> the output tokens of an undisturbed run."""
    return expected_outputs


@pytest.fixture
def make_request():
    def make(request_id: str, prompt, *, arrival_index: int = 0, priority: int = 0) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(),
            max_tokens=16,
            seed=0,
            priority=priority,
            arrival_index=arrival_index,
        )

    return make
