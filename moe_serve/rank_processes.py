"""The other ranks of an offline engine, started as children of this process."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess

from moe_serve.config import EngineConfig
from moe_serve.errors import EngineDeadError, MoeServeError
from moe_serve.lifeline import end_with_parent
from moe_serve.logs import set_up
from moe_serve.parallel.degrees import RankSeat, local_seat
from moe_serve.parallel.world import LOOPBACK, leave

logger = logging.getLogger(__name__)

JOIN_SECONDS = 10.0


class RankProcesses:
    """Ranks 1 to `world_size` - 1; this process is to be rank 0, with `seat` and `init_method`.

    They end with `close` or `kill`, or at the latest with this process.
    """

    def __init__(self, config: EngineConfig, world_size: int) -> None:
        self.init_method = f"tcp://{LOOPBACK}:{_free_port()}"
        self.seat = local_seat(0, world_size)
        self._processes: list[BaseProcess] = []
        self._owner = os.getpid()
        # Before multiprocessing does its part, which is to wait for them.
        atexit.register(self.kill)
        try:
            for rank in range(1, world_size):
                self._processes.append(self._start(config, local_seat(rank, world_size)))
        except BaseException:
            self.kill()
            raise

    def _start(self, config: EngineConfig, seat: RankSeat) -> BaseProcess:
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(config, seat, self.init_method), name=f"rank-{seat.rank}"
        )
        process.start()
        return process

    def check(self) -> None:
        """Raises `EngineDeadError` where one has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if process.exitcode is not None:
                raise EngineDeadError(
                    f"rank {rank} (process {process.pid}) ended at its start with exit code "
                    f"{process.exitcode}; if it wrote of a bootstrapping phase, this script needs "
                    'its work below `if __name__ == "__main__":`'
                )

    def kill(self) -> None:
        """End them at once. Not as a copy of this process that a fork made, which ends too."""
        if os.getpid() != self._owner:
            return
        for process in self._processes:
            process.kill()
        self.close()
        # While there is an interpreter: torch's threads are joined here, not at the very end.
        leave()

    def close(self) -> None:
        """Wait for their end, which rank 0 has asked for; by force if it takes too long."""
        deadline = time.monotonic() + JOIN_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        atexit.unregister(self.kill)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        port: int = sock.getsockname()[1]
        return port


def _run(config: EngineConfig, seat: RankSeat, init_method: str) -> None:
    from moe_serve import rank_worker

    # Ctrl-C reaches the whole group: rank 0 decides what comes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up("warning", role=f"rank {seat.rank}")
    end_with_parent()
    try:
        code = rank_worker.run(config, seat, init_method=init_method)
    except MoeServeError as error:
        logger.error("%s", error)
        code = rank_worker.EXIT_CONFIG
    sys.exit(code)
