"""Runs the steps of an engine on all ranks together, as rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moe_serve.errors import LogitsError, MoeServeError, NoTokenLeftError
from moe_serve.load_display import LoadDisplay
from moe_serve.model_runner import ModelRunner, StepResult
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.world import join, leave
from moe_serve.rank_links import RankLinks
from moe_serve.rank_messages import (
    ForgetWarmUp,
    LaneFailure,
    LaneResult,
    MakePool,
    RankLoad,
    RankLoaded,
    RankReady,
    ReadLoad,
)
from moe_serve.rank_setup import RankSetup
from moe_serve.step import StepPlan
from moe_serve.step_codec import StepEncoder


class RankedExecutor:
    """All ranks, this one being rank 0: each runs its lane's part of the plan."""

    def __init__(self, runner: ModelRunner, links: RankLinks, layout: RankLayout) -> None:
        self.runner = runner
        self._links = links
        self._layout = layout
        self._encoder = StepEncoder(layout.data_size)

    def run(self, plan: StepPlan) -> StepResult:
        for lane, message in enumerate(self._encoder.encode(plan)):
            for rank in self._layout.lane_ranks(lane):
                if rank:
                    self._links.send(rank, message)
        own = self.runner.run(plan.of_lane(0))
        assert own is not None
        results, failures = list(own.results), dict(own.failures)
        for lane in range(1, self._layout.data_size):
            if plan.num_tokens_of_lanes[lane]:
                answer = self._links.receive(self._layout.lane_ranks(lane)[0], LaneResult)
                results += answer.results
                failures |= {failure.request_id: _error(failure) for failure in answer.failures}
        return StepResult(results=results, failures=failures)

    def expert_load(self) -> list[list[int]]:
        self._links.send_all(ReadLoad())
        others = [answer.counts for answer in self._links.receive_all(RankLoad)]
        return _sum([self.runner.load.to_list(), *others])

    def forget_warm_up(self, num_blocks: int) -> None:
        self._links.send_all(ForgetWarmUp(num_blocks=num_blocks))
        self.runner.forget_warm_up(num_blocks)

    def close(self) -> None:
        self._links.close()
        leave()


def to_lane_result(result: StepResult) -> LaneResult:
    """What a lane's leader sends home."""
    return LaneResult(
        results=result.results,
        failures=[
            LaneFailure(request_id=name, message=str(error), is_client_fault=error.is_client_fault)
            for name, error in result.failures.items()
        ],
    )


def _error(failure: LaneFailure) -> LogitsError:
    kind = NoTokenLeftError if failure.is_client_fault else LogitsError
    return kind(failure.message)


def _sum(loads: Iterable[list[list[int]]]) -> list[list[int]]:
    return [
        [sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*loads, strict=True)
    ]


def load_ranks(
    setup: RankSetup,
    init_method: str,
    on_failure: Callable[[MoeServeError], None],
    *,
    show_progress: bool,
) -> tuple[RankedExecutor, int]:
    """Load on all ranks together -> what runs their steps, and the KV blocks of each lane."""
    assert setup.seat is not None and setup.seat.rank == 0
    world = join(setup.seat, setup.device, setup.config.collective_timeout, init_method)
    with LoadDisplay(world.seat.world_size, is_shown=show_progress) as display:
        links = RankLinks(world, on_failure, display.advance)
        try:
            ranks = setup.ranks(world)
            model = setup.load(ranks, display.advance_own, show_progress=False)
            others = [answer.num_blocks for answer in links.receive_all(RankLoaded)]
            num_blocks = min(setup.num_fitting_blocks, *others)
            links.send_all(MakePool(num_blocks=num_blocks))
            runner = setup.make_runner(model, num_blocks)
            links.receive_all(RankReady)
        except BaseException:
            links.close()
            leave()
            raise
    return RankedExecutor(runner, links, setup.layout), num_blocks
