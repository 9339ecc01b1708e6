"""Starts all ranks of this host through torch's elastic launcher, as torchrun would."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from moe_serve.config import ServeConfig
from moe_serve.logs import set_up
from moe_serve.model_path import resolve_model
from moe_serve.parallel.degrees import Degrees, local_seat
from moe_serve.parallel.world import LOOPBACK
from moe_serve.rank_setup import RankSetup

EXIT_FAULT = 1
# What the server needs after `--shutdown-timeout`, before its launcher loses patience.
SPARE_SECONDS = 10
# Seconds, where the user set no limit.
MAX_PATIENCE = 1e6

logger = logging.getLogger(__name__)


def run(config: ServeConfig, argv: Sequence[str], degrees: Degrees) -> int:
    """Serve with that many ranks until a signal or a failure; the exit code.

    `argv`: what each rank is started with. Raises `ConfigError` or `CheckpointError` for what the
    ranks would refuse, before any of them is started.
    """
    set_up(config.log_level, role="launcher")
    # Until torch's launcher has a handler of its own, which is when there are ranks to end.
    signal.signal(signal.SIGTERM, _end)
    folder = resolve_model(config.model, config.revision)
    checked = dataclasses.replace(config.engine, model=str(folder), revision=None)
    RankSetup.make(checked, local_seat(0, degrees.world_size))
    _silence_launcher()
    _be_patient(config.shutdown_timeout)
    try:
        launch_agent(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=degrees.world_size,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                # Not this host's own name, which may lead nowhere.
                local_addr=LOOPBACK,
                max_restarts=0,
            ),
            sys.executable,
            ["-m", "moe_serve", "serve", *argv],
        )
    except SignalException:
        # The ranks were told, and have ended.
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        # It could not tell itself.
        logger.error(
            "rank %d (process %d) was ended by %s", rank, failure.pid, failure.signal_name()
        )
        return EXIT_FAULT
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _be_patient(shutdown_timeout: float) -> None:
    """Let torch's launcher wait longer than our server may take. The variable tells both of them;
    a torch that does not know it waits for its 30 s, as the server takes for granted.
    """
    if any(field.name == "shutdown_timeout" for field in dataclasses.fields(LaunchConfig)):
        patience = int(min(shutdown_timeout, MAX_PATIENCE)) + SPARE_SECONDS
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(patience))


def _silence_launcher() -> None:
    """Its words are about its own workings; the server tells what its user needs to know."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
