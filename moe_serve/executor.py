"""Runs the steps of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from moe_serve.decode_graphs import cuda_capture
from moe_serve.experts.load import LoadCounts
from moe_serve.model_runner import ModelRunner, StepResult
from moe_serve.parallel.comm_log import GroupCommunication
from moe_serve.step import StepPlan


class Executor(Protocol):
    """`runner`: of this rank."""

    runner: ModelRunner

    def run(self, plan: StepPlan) -> StepResult:
        """One result per chunk of the plan, in order."""

    def read_load(self) -> LoadCounts:
        """What was counted so far on all ranks."""

    def read_communication(self) -> list[list[GroupCommunication]]:
        """What was moved so far, by rank and group of its; no groups where there is one rank."""

    def forget_warm_up(self, num_blocks: int) -> None:
        """Wipe the load, what was noted of communication, and the first blocks of each pool."""

    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> Iterator[float]:
        """Make decode steps cheaper to launch, where that can be; yields the share that is done."""

    def close(self) -> None:
        """End the other ranks and let go of everything shared."""


class LocalExecutor:
    """One rank, this one."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        # Ctrl-C may cut it short, when some layers have counted its tokens and others have not.
        with self.runner.load.or_nothing():
            result = self.runner.run(plan)
        assert result is not None
        return result

    def read_load(self) -> LoadCounts:
        return self.runner.load.read()

    def read_communication(self) -> list[list[GroupCommunication]]:
        return [self.runner.communication()]

    def forget_warm_up(self, num_blocks: int) -> None:
        self.runner.forget_warm_up(num_blocks)

    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> Iterator[float]:
        if self.runner.device.type == "cuda":
            yield from self.runner.capture_graphs(max_num_seqs, max_model_len, cuda_capture())

    def close(self) -> None:
        pass
