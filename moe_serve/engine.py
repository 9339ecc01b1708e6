"""One engine: a model, its KV pool and the scheduler that feeds it, stepped by its owner."""

from __future__ import annotations

import time
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.executor import Executor
from moe_serve.expert_service import ExpertService
from moe_serve.messages import (
    AddRequest,
    CommTotal,
    EngineOutputs,
    EngineReady,
    EngineStats,
    RequestUpdate,
)
from moe_serve.reports import communication
from moe_serve.sampling_params import check_token_ids
from moe_serve.scheduler import Scheduler

# Without requests, between two looks at experts that are on their way.
BUSY_MS = 5
# Between two times that totals of communication are told, unless there is nothing left to do.
TELL_STEPS = 32


class Engine:
    """Not thread-safe: one loop adds, aborts and steps. Made by `engine_loader.load_engine`."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        experts: ExpertService,
        info: EngineReady,
        max_logprobs: int,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.experts = experts
        self.info = info
        self.max_logprobs = max_logprobs
        self._steps_untold = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def idle_ms(self) -> int | None:
        """How long to wait for messages before the next step; None: until one comes."""
        if self.has_work:
            return 0
        return BUSY_MS if self.experts.is_busy else None

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def add(self, request: AddRequest) -> None:
        """Accept a request, or raise `RequestError`; nothing else is disturbed."""
        check_token_ids("prompt", request.prompt_token_ids, self.info.vocab_size)
        sampling = request.sampling
        sampling.check_vocabulary(self.info.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling, name)
            if value is not None and value > self.max_logprobs:
                raise RequestError(
                    f"{name} {value} exceeds the limit of {self.max_logprobs}", param=name
                )
        self.scheduler.add(request)

    def abort(self, request_ids: list[str]) -> None:
        self.scheduler.abort(request_ids)

    def step(self) -> EngineOutputs:
        """Run one step. Without work it does nothing and tells nothing new."""
        self.experts.before_step()
        plan = self.scheduler.schedule(records_routes=self.experts.records_routes)
        updates: list[RequestUpdate] = []
        if plan is not None:
            started = time.monotonic()
            outcome = self.executor.run(plan)
            self.experts.after_step(plan, outcome.results, time.monotonic() - started)
            for request_id, error in outcome.failures.items():
                updates.append(self.scheduler.fail(request_id, error))
            updates += self.scheduler.update(plan, outcome.results)
            self._steps_untold += 1
        return EngineOutputs(
            updates=updates,
            stats=self.stats,
            experts=self.experts.take_stats(),
            communication=self._take_communication(),
        )

    def communication(self) -> dict[str, Any]:
        """What the ranks have moved so far: see `reports.communication`."""
        return communication.build(self.executor.read_communication())

    def _take_communication(self) -> list[CommTotal] | None:
        is_due = self._steps_untold >= TELL_STEPS or not self.has_work
        if self.info.num_ranks == 1 or not self._steps_untold or not is_due:
            return None
        self._steps_untold = 0
        return communication.totals(self.executor.runner.communication())

    def close(self) -> None:
        """End the other ranks, if any."""
        self.executor.close()

    def refusal(self, request: AddRequest, error: RequestError) -> EngineOutputs:
        """What to answer for a request that `add` refused."""
        update = RequestUpdate(
            request_id=request.request_id,
            token_ids=[],
            finish_reason="error",
            error=error.message,
            is_client_fault=True,
            scheduled_time=time.time(),
        )
        return EngineOutputs(updates=[update], stats=self.stats)
