"""Moves experts between ranks while the engine serves: plan, copy beside, switch, or roll back."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from moe_serve.eplb_config import EplbConfig
from moe_serve.errors import PlacementError
from moe_serve.experts.analysis import load_statistics
from moe_serve.experts.balance import balance
from moe_serve.experts.moving.migration import (
    Copies,
    layers_of,
    plan_copies,
    replaced,
    split_copies,
)
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import Ints
from moe_serve.rank_messages import Staging

logger = logging.getLogger(__name__)

# Between two questions to the ranks of how far they are; each is a round trip between steps.
POLL_SECONDS = 0.005

Outcome = Literal["done", "unneeded", "failed"]

# Shapes: L MoE layers, E logical experts.


@runtime_checkable
class ExpertMover(Protocol):
    """All ranks together. Nothing of a step may be on its way when these are called."""

    def stage(self, copies: Copies, timeout: float) -> None:
        """Begin to fetch these weights beside those in use."""

    def staging(self) -> Staging:
        """How far all ranks are."""

    def switch(self, placement: Placement, layers: list[int]) -> None:
        """From the next step on what was staged is in use, in these layers."""

    def drop_staged(self) -> None:
        """Stop, and forget what was staged."""

    def checksums(self) -> list[list[list[int]]]:
        """By rank, MoE layer and slot: of the weights in use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceResult:
    """`balancedness`: mean over layers, as the load that was balanced predicts it; before, after.

    `num_moves` slots got another expert, `num_bytes` came from other ranks for it. Failed: `error`
    says why, and `num_layers_switched` layers had been switched before.
    """

    outcome: Outcome
    seconds: float
    num_moves: int
    num_bytes: int
    balancedness: tuple[float, float] | None = None
    num_layers_switched: int = 0
    error: str | None = None


OnResult = Callable[[RebalanceResult], None]
OnRefusal = Callable[[PlacementError], None]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Job:
    """One rebalance on its way: `parts` that are left, the first being staged."""

    target: Placement
    parts: list[Copies]
    num_moves: int
    balancedness: tuple[float, float] | None
    on_result: OnResult
    started: float
    deadline: float
    next_poll: float = 0.0
    num_bytes: int = 0
    layers: list[int] = dataclasses.field(default_factory=list)


class _Planning:
    """A placement that is looked for in a thread of its own."""

    def __init__(
        self, plan: Callable[[], Placement], go: Callable[[Placement], None], on_refusal: OnRefusal
    ) -> None:
        self._go, self._on_refusal = go, on_refusal
        self._found: Placement | Exception | None = None
        self._thread = threading.Thread(target=self._look, args=(plan,), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._found is not None

    def end(self) -> None:
        """In the loop's own thread. Raises what is no refusal, which is a fault of ours."""
        found = self._found
        assert found is not None
        if isinstance(found, PlacementError):
            self._on_refusal(found)
        elif isinstance(found, Exception):
            raise found
        else:
            self._go(found)

    def _look(self, plan: Callable[[], Placement]) -> None:
        try:
            self._found = plan()
        except Exception as error:
            self._found = error


class Rebalancer:
    """`placement` is the one in use. `expert_bytes`: weights of one expert of one layer.
    `on_switch` is called after each part was switched.

    One rebalance at a time. Its weights are copied in parts of whole layers, as many at once as
    `staging_mib` holds; each part is switched on all ranks between the same two steps. When a part
    fails, or time is over, the layers that were not switched yet stay as they are: what is in use
    is a whole placement at any time.
    """

    def __init__(
        self,
        mover: ExpertMover,
        placement: Placement,
        config: EplbConfig,
        expert_bytes: int,
        on_switch: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement = placement
        self.outcomes = collections.Counter[str]()
        self.last_seconds = 0.0
        self._mover = mover
        self._config = config
        self._max_staged = max(1, config.staging_mib * 2**20 // max(1, expert_bytes))
        self._on_switch = on_switch
        self._clock = clock
        self._planning: _Planning | None = None
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        return self._planning is not None or self._job is not None

    def check_idle(self) -> None:
        """Raises `PlacementError` while a rebalance is on its way."""
        if self.is_busy:
            raise PlacementError("experts are being moved already; wait until that is done")

    def plan(self, load_LE: Ints, max_moves: int | None = None) -> Placement:
        """The placement to go to. Raises `PlacementError` for a goal that cannot be."""
        config = self._config
        goal = config.goal(config.max_moves if max_moves is None else max_moves)
        slots = self.placement.slots_of_ranks
        return balance(load_LE, slots, current=self.placement, goal=goal)

    def gain(self, load_LE: Ints, target: Placement) -> tuple[float, float]:
        """Balancedness, mean over layers, of the placement in use and of the target."""
        before, after = (
            float(load_statistics.balancedness(load_statistics.rank_loads(load_LE, each)).mean())
            for each in (self.placement, target)
        )
        return before, after

    def start_by_load(
        self,
        load_LE: Ints,
        on_result: OnResult = lambda result: None,
        on_refusal: OnRefusal = lambda error: None,
        *,
        max_moves: int | None = None,
        min_gain: float | None = None,
    ) -> None:
        """Go where `plan` says, which is found in a thread of its own: for many layers that takes
        tenths of a second. What cannot be is told to `on_refusal`, by `advance`.

        Raises `PlacementError` while another one is on its way.
        """
        self.check_idle()

        def go(target: Placement) -> None:
            self.start(target, load_LE, on_result, min_gain=min_gain)

        self._planning = _Planning(lambda: self.plan(load_LE, max_moves), go, on_refusal)

    def start(
        self,
        target: Placement,
        load_LE: Ints | None,
        on_result: OnResult = lambda result: None,
        *,
        min_gain: float | None = None,
    ) -> None:
        """Go there. Where that needs no copy, or gains less, the result comes at once.

        `load_LE` predicts the gain. Raises `PlacementError` while another one is on its way, or
        where the target does not fit the ranks.
        """
        self._check(target)
        started = self._clock()
        before_after = None if load_LE is None else self.gain(load_LE, target)
        copies = plan_copies(self.placement, target)
        num_moves = sum(map(len, copies))
        gains_enough = (
            min_gain is None or before_after is None or before_after[1] - before_after[0] > min_gain
        )
        self._job = _Job(
            target=target,
            parts=split_copies(copies, self._max_staged) if gains_enough else [],
            num_moves=num_moves if gains_enough else 0,
            balancedness=before_after,
            on_result=on_result,
            started=started,
            deadline=started + self._config.transfer_timeout,
        )
        if self._job.parts:
            self._stage()
        else:
            self._finish("unneeded")

    def _check(self, target: Placement) -> None:
        self.check_idle()
        now = self.placement
        if target.slots_of_ranks != now.slots_of_ranks or target.num_layers != now.num_layers:
            raise PlacementError(
                f"{target.num_layers} layers with {list(target.slots_of_ranks)} slots a rank; here "
                f"are {now.num_layers} with {list(now.slots_of_ranks)}"
            )
        for index, layer in enumerate(target.layers):
            if layer.num_experts < now.num_experts:
                raise PlacementError(f"layer {index}: expert {now.num_experts - 1} has no rank")

    def advance(self) -> None:
        """Between two steps: look how far the ranks are, and switch what is ready."""
        planning = self._planning
        if planning is not None and planning.is_done:
            self._planning = None
            planning.end()
        job = self._job
        if job is None or self._clock() < job.next_poll:
            return
        staging = self._mover.staging()
        job.next_poll = self._clock() + POLL_SECONDS
        if staging.error is not None:
            self._fail(staging.error)
        elif staging.is_done:
            job.num_bytes += staging.num_bytes
            self._switch(job)
        elif self._clock() > job.deadline:
            self._fail(
                f"the weights were not there within transfer_timeout "
                f"{self._config.transfer_timeout:g} s"
            )

    def wait(self) -> None:
        """Go on until it is done, without a step."""
        while self.is_busy:
            self.advance()
            time.sleep(POLL_SECONDS / 10)

    def _stage(self) -> None:
        job = self._job
        assert job is not None
        self._mover.stage(job.parts[0], max(0.0, job.deadline - self._clock()))

    def _switch(self, job: _Job) -> None:
        layers = layers_of(job.parts.pop(0))
        self.placement = replaced(self.placement, job.target, layers)
        self._mover.switch(self.placement, layers)
        self._on_switch()
        job.layers += layers
        if job.parts:
            self._stage()
        else:
            self._finish("done")

    def _fail(self, error: str) -> None:
        self._mover.drop_staged()
        logger.error("experts stay where they are: %s", error)
        self._finish("failed", error)

    def _finish(self, outcome: Outcome, error: str | None = None) -> None:
        job, self._job = self._job, None
        assert job is not None
        seconds = self._clock() - job.started
        self.outcomes[outcome] += 1
        if outcome == "done":
            self.last_seconds = seconds
            logger.info(
                "moved %d experts in %.2f s (%.1f MiB between ranks)",
                job.num_moves,
                seconds,
                job.num_bytes / 2**20,
            )
        job.on_result(
            RebalanceResult(
                outcome=outcome,
                seconds=seconds,
                num_moves=job.num_moves if outcome == "done" else 0,
                num_bytes=job.num_bytes,
                balancedness=job.balancedness,
                num_layers_switched=len(job.layers),
                error=error,
            )
        )
