"""Any rank but the first: joins, loads its slices, then runs the steps that rank 0 sends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from moe_serve.config import EngineConfig
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.messages import Shutdown
from moe_serve.model_runner import ModelRunner
from moe_serve.parallel.degrees import RankSeat
from moe_serve.parallel.world import ENVIRONMENT, World, join, leave
from moe_serve.rank_experts import RankExperts
from moe_serve.rank_links import CAUSE_SECONDS, LeaderLink
from moe_serve.rank_messages import (
    Checksums,
    DropStaged,
    ExpertAddresses,
    FitPool,
    ForgetWarmUp,
    LoadProgress,
    MakePool,
    PoolFits,
    RankCommunication,
    RankFailed,
    RankLoad,
    RankLoaded,
    RankReady,
    ReadChecksums,
    ReadCommunication,
    ReadLoad,
    ReadStaging,
    StageExperts,
    SwitchExperts,
    ToRank,
)
from moe_serve.rank_setup import RankSetup
from moe_serve.ranked_executor import make_rank_experts, to_lane_result
from moe_serve.step_codec import StepDecoder, StepMessage

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
EXIT_FAULT = 1
PROGRESS_SECONDS = 0.2


def run(
    config: EngineConfig,
    seat: RankSeat,
    *,
    init_method: str = ENVIRONMENT,
    on_joined: Callable[[], None] = lambda: None,
    ends_process: bool = True,
) -> int:
    """Serve as that rank until rank 0 says so, or is gone; the exit code.

    Raises `ConfigError` or `CheckpointError` for what is wrong before the ranks have met; later
    errors are told to rank 0. `on_joined` is called when it can tell this rank to end.
    `ends_process`: see `LeaderLink`.
    """
    setup = RankSetup.make(config, seat)
    world = join(seat, setup.device, config.collective_timeout, init_method)
    link = LeaderLink(world, ends_process=ends_process)
    on_joined()
    experts: RankExperts | None = None
    try:
        runner = _load(link, setup, world)
        if runner is not None:
            experts = make_rank_experts(setup, runner, world)
            link.send(RankReady(expert_address="" if experts is None else experts.address))
            _work(link, runner, experts)
    except (ConfigError, CheckpointError) as error:
        return _fail(link, error, is_config=True)
    except Exception as error:
        # If that is for the loss of another rank, rank 0 sees it meanwhile, and ends us.
        time.sleep(CAUSE_SECONDS)
        logger.exception("rank %d failed", seat.rank)
        return _fail(link, error, is_config=False)
    finally:
        if experts is not None:
            experts.close()
        link.close()
        leave()
    return 0


def _load(link: LeaderLink, setup: RankSetup, world: World) -> ModelRunner | None:
    """None: rank 0 gave up meanwhile."""
    model = setup.load(setup.ranks(world), _Progress(link), show_progress=False)
    link.send(RankLoaded())
    answer = link.receive()
    if isinstance(answer, FitPool):
        link.send(PoolFits(num_blocks=setup.num_fitting_blocks(model)))
        answer = link.receive()
    if isinstance(answer, Shutdown):
        return None
    assert isinstance(answer, MakePool)
    return setup.make_runner(model, answer.num_blocks)


def _work(link: LeaderLink, runner: ModelRunner, experts: RankExperts | None) -> None:
    decoder = StepDecoder()
    while True:
        message = link.receive()
        if isinstance(message, Shutdown):
            return
        if isinstance(message, StepMessage):
            plan = decoder.decode(message)
            result = runner.run(plan)
            if result is not None and plan.chunks:
                link.send(to_lane_result(result))
        elif isinstance(message, ForgetWarmUp):
            runner.forget_warm_up(message.num_blocks)
        elif isinstance(message, ReadLoad):
            link.send(RankLoad(counts=runner.load.read().to_bytes()))
        elif isinstance(message, ReadCommunication):
            link.send(RankCommunication(groups=runner.communication()))
        else:
            assert experts is not None
            _move(link, experts, message)


def _move(link: LeaderLink, experts: RankExperts, message: ToRank) -> None:
    if isinstance(message, ExpertAddresses):
        experts.connect(message.addresses)
    elif isinstance(message, StageExperts):
        experts.stage(message.copies, message.timeout)
    elif isinstance(message, ReadStaging):
        link.send(experts.staging())
    elif isinstance(message, SwitchExperts):
        experts.switch(message.layers)
    elif isinstance(message, DropStaged):
        experts.drop_staged()
    else:
        assert isinstance(message, ReadChecksums)
        link.send(Checksums(checksums=experts.checksums()))


def _fail(link: LeaderLink, error: Exception, *, is_config: bool) -> int:
    text = str(error) if is_config else f"{type(error).__name__}: {error}"
    link.send(RankFailed(message=text, is_config=is_config))
    return EXIT_CONFIG if is_config else EXIT_FAULT


class _Progress:
    """Tells rank 0 of bytes read, a few times a second."""

    def __init__(self, link: LeaderLink) -> None:
        self._link = link
        self._last = 0.0

    def __call__(self, bytes_read: int, bytes_needed: int) -> None:
        now = time.monotonic()
        if bytes_read >= bytes_needed or now - self._last >= PROGRESS_SECONDS:
            self._last = now
            self._link.send(LoadProgress(bytes_read=bytes_read, bytes_needed=bytes_needed))
