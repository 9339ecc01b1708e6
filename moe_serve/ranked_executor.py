"""Runs the steps of an engine on all ranks together, as rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from moe_serve.errors import EngineDeadError, LogitsError, MoeServeError, NoTokenLeftError
from moe_serve.experts.load import LoadCounts
from moe_serve.experts.moving.migration import Copies
from moe_serve.experts.placement import Placement
from moe_serve.load_display import LoadDisplay
from moe_serve.model_runner import ModelRunner, StepResult
from moe_serve.parallel.comm_log import GroupCommunication
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.world import World, join, leave
from moe_serve.rank_experts import RankExperts
from moe_serve.rank_links import CAUSE_SECONDS, RankLinks
from moe_serve.rank_messages import (
    Checksums,
    DropStaged,
    ExpertAddresses,
    FitPool,
    ForgetWarmUp,
    LaneFailure,
    LaneResult,
    MakePool,
    PoolFits,
    RankCommunication,
    RankLoad,
    RankLoaded,
    RankReady,
    ReadChecksums,
    ReadCommunication,
    ReadLoad,
    ReadStaging,
    StageExperts,
    Staging,
    SwitchExperts,
)
from moe_serve.rank_setup import RankSetup
from moe_serve.step import StepPlan
from moe_serve.step_codec import StepEncoder


class RankedExecutor:
    """All ranks, this one being rank 0: each runs its lane's part of the plan.

    What is cut short, by Ctrl-C too, leaves ranks in the middle of it, or an answer on its way that
    the next question would get: there is nothing after it. So for a step, and for all else.
    """

    def __init__(
        self,
        runner: ModelRunner,
        links: RankLinks,
        layout: RankLayout,
        experts: RankExperts | None = None,
    ) -> None:
        self.runner = runner
        self._experts = experts
        self._links = links
        self._layout = layout
        self._encoder = StepEncoder(layout.data_size)
        self._is_whole = True

    def run(self, plan: StepPlan) -> StepResult:
        """Raises `EngineDeadError` where a rank was lost, in this step or before."""
        with self._wholly(), causes(self._links):
            return self._run(plan)

    @contextlib.contextmanager
    def _wholly(self) -> Iterator[None]:
        if not self._is_whole:
            raise EngineDeadError("a step was cut short, which its ranks do not survive")
        self._is_whole = False
        yield
        self._is_whole = True

    def _run(self, plan: StepPlan) -> StepResult:
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

    def read_load(self) -> LoadCounts:
        with self._wholly():
            self._links.send_all(ReadLoad())
            own = self.runner.load.read()
            answers = self._links.receive_all(RankLoad)
        shape = own.counts_LCE.shape
        others = [LoadCounts.from_bytes(answer.counts, shape) for answer in answers]
        return LoadCounts.join([own, *others])

    def read_communication(self) -> list[list[GroupCommunication]]:
        with self._wholly():
            self._links.send_all(ReadCommunication())
            own = self.runner.communication()
            answers = self._links.receive_all(RankCommunication)
        return [own, *(answer.groups for answer in answers)]

    def forget_warm_up(self, num_blocks: int) -> None:
        with self._wholly():
            self._links.send_all(ForgetWarmUp(num_blocks=num_blocks))
            self.runner.forget_warm_up(num_blocks)

    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> Iterator[float]:
        """None: dispatch and collectives decide on the host how much they move."""
        return iter(())

    def stage(self, copies: Copies, timeout: float) -> None:
        with self._wholly():
            for rank, own in enumerate(copies[1:], start=1):
                self._links.send(rank, StageExperts(copies=list(own), timeout=timeout))
            self._own_experts.stage(copies[0], timeout)

    def staging(self) -> Staging:
        with self._wholly():
            self._links.send_all(ReadStaging())
            own = self._own_experts.staging()
            found = [own, *self._links.receive_all(Staging)]
        errors = (state.error for state in found if state.error is not None)
        return Staging(
            is_done=all(state.is_done for state in found),
            num_bytes=sum(state.num_bytes for state in found),
            error=next(errors, None),
        )

    def switch(self, placement: Placement, layers: list[int]) -> None:
        told = {index: [list(own) for own in placement.layers[index].experts] for index in layers}
        with self._wholly():
            self._links.send_all(SwitchExperts(layers=told))
            self._own_experts.switch(told)

    def drop_staged(self) -> None:
        with self._wholly():
            self._links.send_all(DropStaged())
            self._own_experts.drop_staged()

    def checksums(self) -> list[list[list[int]]]:
        with self._wholly():
            self._links.send_all(ReadChecksums())
            own = self._own_experts.checksums()
            answers = self._links.receive_all(Checksums)
        return [own, *(answer.checksums for answer in answers)]

    @property
    def _own_experts(self) -> RankExperts:
        assert self._experts is not None, "whoever moves experts has enabled it"
        return self._experts

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
        self._links.close()
        self.runner.model.ranks.close()
        leave()


def make_rank_experts(setup: RankSetup, runner: ModelRunner, world: World) -> RankExperts | None:
    """None where experts do not move."""
    if not setup.config.enable_eplb:
        return None
    return RankExperts(runner.model, world)


@contextlib.contextmanager
def causes(links: RankLinks) -> Iterator[None]:
    """Raise, instead of torch's error about a connection, what has become of the other rank."""
    try:
        yield
    except RuntimeError as error:
        cause = links.wait_failure(CAUSE_SECONDS)
        if cause is None:
            raise
        raise cause from error


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


def load_ranks(
    setup: RankSetup,
    init_method: str,
    check_others: Callable[[], None],
    on_failure: Callable[[MoeServeError], None],
    *,
    show_progress: bool,
) -> tuple[RankedExecutor, int]:
    """Load on all ranks together -> what runs their steps, and the KV blocks of each lane."""
    assert setup.seat is not None and setup.seat.rank == 0
    timeout = setup.config.collective_timeout
    world = join(setup.seat, setup.device, timeout, init_method, check_others)
    try:
        with LoadDisplay(world.seat.world_size, is_shown=show_progress) as display:
            links = RankLinks(world, on_failure, display.advance)
            try:
                with causes(links):
                    return _load(setup, world, links, display.advance_own)
            except BaseException:
                links.close()
                raise
    except BaseException:
        leave()
        raise


def _load(
    setup: RankSetup, world: World, links: RankLinks, on_progress: Callable[[int, int], None]
) -> tuple[RankedExecutor, int]:
    model = setup.load(setup.ranks(world), on_progress, show_progress=False)
    links.receive_all(RankLoaded)
    # Only now: the largest step, which may be run for it, needs all ranks.
    links.send_all(FitPool())
    own = setup.num_fitting_blocks(model)
    num_blocks = min(own, *(answer.num_blocks for answer in links.receive_all(PoolFits)))
    links.send_all(MakePool(num_blocks=num_blocks))
    runner = setup.make_runner(model, num_blocks)
    experts = make_rank_experts(setup, runner, world)
    try:
        others = [answer.expert_address for answer in links.receive_all(RankReady)]
        if experts is not None:
            addresses = [experts.address, *others]
            links.send_all(ExpertAddresses(addresses=addresses))
            experts.connect(addresses)
    except BaseException:
        # Its thread would keep the weights.
        if experts is not None:
            experts.close()
        raise
    return RankedExecutor(runner, links, setup.layout, experts), num_blocks
