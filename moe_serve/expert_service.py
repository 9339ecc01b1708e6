"""All about experts that is not a step: counting, recording, moving, and answering for it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb_config import EplbConfig
from moe_serve.errors import MoeServeError, PlacementError, RecordingError
from moe_serve.expert_monitor import ExpertMonitor, LoadSlice
from moe_serve.expert_recorder import ExpertRecorder
from moe_serve.experts.files.documents import plain
from moe_serve.experts.files.load_files import to_json
from moe_serve.experts.files.placement_files import placement_values
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import Ints
from moe_serve.messages import (
    CallAnswer,
    ExpertCall,
    ExpertStats,
    LoadCall,
    PlacementCall,
    RebalanceCall,
    RecordCall,
)
from moe_serve.rebalancer import ExpertMover, Rebalancer, RebalanceResult
from moe_serve.step import ChunkResult, StepPlan

logger = logging.getLogger(__name__)

# Shapes: L MoE layers, E logical experts, R ranks, P slots.


class ExpertService:
    """Part of the engine's loop, never called while a step runs.

    `placement` is None without expert parallelism; `mover`, where experts do not move.
    `record_dir`: where recordings are written.
    """

    def __init__(
        self,
        monitor: ExpertMonitor,
        placement: Placement | None,
        config: EplbConfig,
        mover: ExpertMover | None,
        record_dir: Path,
    ) -> None:
        self.monitor = monitor
        self._placement = placement
        self._config = config
        self._mover = mover
        self.rebalancer: Rebalancer | None = None
        if mover is not None and placement is not None:
            expert_bytes = monitor.facts.expert_bytes
            self.rebalancer = Rebalancer(mover, placement, config, expert_bytes, monitor.note_move)
        self._recorder = ExpertRecorder(monitor, record_dir)
        self._steps_since_rebalance = 0
        self._num_collections = 0
        self._stats_told: ExpertStats | None = None
        self._answers: list[CallAnswer] = []
        monitor.on_slice = self._take_slice

    @property
    def placement(self) -> Placement | None:
        """The one in use; None without expert parallelism."""
        return self._placement if self.rebalancer is None else self.rebalancer.placement

    @property
    def is_busy(self) -> bool:
        """Whether `before_step` has something to do without requests, too."""
        return self.rebalancer is not None and self.rebalancer.is_busy

    @property
    def records_routes(self) -> bool:
        return self._recorder.records_routes

    def before_step(self) -> None:
        """Move experts on, if any are on their way or it is time to."""
        rebalancer, interval = self.rebalancer, self._config.step_interval
        if rebalancer is None:
            return
        rebalancer.advance()
        if interval and self._steps_since_rebalance >= interval and not rebalancer.is_busy:
            self._steps_since_rebalance = 0
            self._rebalance_by_itself(rebalancer)
        if not self._config.use_async:
            rebalancer.wait()

    def _rebalance_by_itself(self, rebalancer: Rebalancer) -> None:
        def stay(error: PlacementError) -> None:
            # From where a file or a client has put the experts, max_moves may not reach the goal.
            logger.warning("experts stay where they are: %s", error)

        load_LE, min_gain = self._recent_load(), self._config.min_gain
        rebalancer.start_by_load(load_LE, on_refusal=stay, min_gain=min_gain)

    def after_step(self, plan: StepPlan, results: Sequence[ChunkResult], seconds: float) -> None:
        """To be called before the scheduler applies the results."""
        if not self.monitor.num_experts:
            return
        self._steps_since_rebalance += 1
        self.monitor.after_step(plan, seconds, max_steps=self._recorder.num_steps_left)
        self._recorder.observe(plan, results)

    def take_stats(self) -> ExpertStats | None:
        """What is new since the last time."""
        stats, rebalancer = self.monitor.stats, self.rebalancer
        if stats is not None and rebalancer is not None:
            stats = dataclasses.replace(
                stats,
                is_rebalancing=rebalancer.is_busy,
                rebalances=dict(rebalancer.outcomes),
                rebalance_seconds=rebalancer.last_seconds,
            )
        if stats == self._stats_told:
            return None
        self._stats_told = stats
        return stats

    def take_answers(self) -> list[CallAnswer]:
        answers, self._answers = self._answers, []
        return answers

    def call(self, message: ExpertCall) -> None:
        """Its answer is among those of `take_answers`, at once or later."""
        try:
            if not self.monitor.num_experts:
                raise PlacementError("the model has no layers with experts")
            if isinstance(message, RebalanceCall):
                self._rebalance(message)
                return
            if isinstance(message, LoadCall):
                self.monitor.collect()
                body = to_json(self.monitor.recording(self.placement))
            elif isinstance(message, PlacementCall):
                body = self._describe_placement(message.verify)
            else:
                body = self._record(message)
            self._answer(message.call_id, body)
        except (PlacementError, RecordingError) as error:
            self._refuse(message.call_id, error)

    def _answer(self, call_id: int, body: dict[str, Any]) -> None:
        self._answers.append(CallAnswer(call_id=call_id, body=body))

    def _refuse(self, call_id: int, error: MoeServeError) -> None:
        self._answers.append(CallAnswer(call_id=call_id, error=str(error), is_client_fault=True))

    def _recent_load(self) -> Ints:
        """[L, E]: of the newest window."""
        self.monitor.collect()
        load_LE: Ints = self.monitor.window.counts_LCE.sum(1)
        return load_LE

    def _describe_placement(self, verify: bool) -> dict[str, Any]:
        placement = self.placement
        if placement is None:
            raise PlacementError(
                "experts are not spread over ranks here; start with --enable-expert-parallel"
            )
        body: dict[str, Any] = plain(placement_values(placement))
        if verify:
            body["checksums"] = self._checksums(placement)
        return body

    def _checksums(self, placement: Placement) -> list[list[int]]:
        """By MoE layer and logical expert. Raises `PlacementError` where replicas differ."""
        if self._mover is None:
            raise PlacementError("verify needs --enable-eplb: without it no weights ever move")
        by_rank = self._mover.checksums()
        found = []
        for index, layer in enumerate(placement.layers):
            sums: dict[int, int] = {}
            for rank, own in enumerate(layer.experts):
                for slot, expert in enumerate(own):
                    value = by_rank[rank][index][slot]
                    if sums.setdefault(expert, value) != value:
                        raise PlacementError(
                            f"layer {index}: rank {rank} holds other weights of expert {expert} "
                            "than another rank; restart the server"
                        )
            found.append([sums[expert] for expert in range(layer.num_experts)])
        return found

    def _rebalance(self, message: RebalanceCall) -> None:
        rebalancer = self.rebalancer
        if rebalancer is None:
            raise PlacementError("experts stay where they are without --enable-eplb")

        def on_result(result: RebalanceResult) -> None:
            self._tell(message.call_id, result)

        if message.slots is None:
            rebalancer.start_by_load(
                self._recent_load(),
                on_result,
                lambda error: self._refuse(message.call_id, error),
                max_moves=message.max_moves,
            )
        else:
            rebalancer.check_idle()
            target = self._read_slots(message.slots, rebalancer.placement)
            rebalancer.start(target, self._recent_load(), on_result)

    def _tell(self, call_id: int, result: RebalanceResult) -> None:
        if result.outcome == "failed":
            error = (
                f"experts were not moved: {result.error} ({result.num_layers_switched} layers had "
                "been switched before, the others stay as they were)"
            )
            self._answers.append(CallAnswer(call_id=call_id, error=error))
        else:
            self._answer(call_id, dataclasses.asdict(result))

    @staticmethod
    def _read_slots(slots: list[list[int]], now: Placement) -> Placement:
        if len(slots) != now.num_layers:
            raise PlacementError(
                f"slots of {len(slots)} layers; here are {now.num_layers} with "
                f"{list(now.slots_of_ranks)} slots by rank"
            )
        for index, row in enumerate(slots):
            if len(row) != now.num_slots:
                raise PlacementError(
                    f"layer {index} has {len(row)} slots; here are {now.num_slots}, "
                    f"{list(now.slots_of_ranks)} by rank"
                )
            unknown = next((e for e in row if not 0 <= e < now.num_experts), None)
            if unknown is not None:
                raise PlacementError(
                    f"layer {index}: there is no expert {unknown}; the model has "
                    f"{now.num_experts}, from 0"
                )
        slots_LP = np.array(slots, dtype=np.int64).reshape(-1, now.num_slots)
        return Placement.of_slots(slots_LP, now.slots_of_ranks)

    def _take_slice(self, part: LoadSlice) -> None:
        self._recorder.add(part)
        self._num_collections += 1
        stats, every = self.monitor.stats, self._config.log_balancedness_interval
        if self._config.log_balancedness and self._num_collections % every == 0:
            assert stats is not None
            logger.info(
                "balancedness %.3f on average, %.3f in the worst layer",
                stats.balancedness_mean,
                stats.balancedness_min,
            )

    def _record(self, message: RecordCall) -> dict[str, Any]:
        # What was counted before belongs to what was before.
        self.monitor.collect()
        if message.action == "dump":
            return self._recorder.dump(message.style, self.placement)
        if message.action == "start":
            self._recorder.start(message.mode, message.window)
        else:
            self._recorder.stop()
        return {"is_recording": self._recorder.is_recording}
