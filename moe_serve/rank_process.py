"""The process of any rank but the first, as a launcher started it."""

from __future__ import annotations

import logging
import signal
import time

from moe_serve import rank_worker
from moe_serve.config import ServeConfig
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.lifeline import end_with_launcher
from moe_serve.logs import set_up
from moe_serve.parallel.degrees import RankSeat

logger = logging.getLogger(__name__)

# Until the neighbour that meets the same error has told of it, or is too late.
NEIGHBOUR_SECONDS = 15.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(config: ServeConfig, seat: RankSeat) -> int:
    """Serve as that rank; the exit code. Raises what the user must mend."""
    set_up(config.log_level, role=f"rank {seat.rank}")
    end_with_launcher()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        return rank_worker.run(config.engine, seat, on_joined=_ignore_signals)
    except (ConfigError, CheckpointError):
        # Neighbours meet the same error; one line a host is enough. The launcher ends the others
        # as soon as one has ended, so the first must not be outrun by those that stay silent.
        if seat.local_rank > 0:
            time.sleep(NEIGHBOUR_SECONDS)
        raise


def _ignore_signals() -> None:
    """From now on rank 0 decides: it lets running requests end before it ends this rank."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
