"""Starts all ranks of this host through torch's elastic launcher, as torchrun would."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from moe_serve.config import ServeConfig
from moe_serve.logs import set_up
from moe_serve.model_path import resolve_model
from moe_serve.parallel.degrees import Degrees, local_seat
from moe_serve.rank_setup import RankSetup

EXIT_FAULT = 1
# What the server needs after `--shutdown-timeout`, before its launcher loses patience.
SPARE_SECONDS = 10


def run(config: ServeConfig, argv: Sequence[str], degrees: Degrees) -> int:
    """Serve with that many ranks until a signal or a failure; the exit code.

    `argv`: what each rank is started with. Raises `ConfigError` or `CheckpointError` for what the
    ranks would refuse, before any of them is started.
    """
    set_up(config.log_level, role="launcher")
    folder = resolve_model(config.model, config.revision)
    checked = dataclasses.replace(config.engine, model=str(folder), revision=None)
    RankSetup.make(checked, local_seat(0, degrees.world_size))
    _silence_launcher()
    patience = int(config.shutdown_timeout) + SPARE_SECONDS
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(patience))
    try:
        launch_agent(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=degrees.world_size,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
            ),
            sys.executable,
            ["-m", "moe_serve", "serve", *argv],
        )
    except SignalException:
        # The ranks were told, and have ended.
        return 0
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else EXIT_FAULT
    return 0


def _silence_launcher() -> None:
    """Its words are about its own workings; the server tells what its user needs to know."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
