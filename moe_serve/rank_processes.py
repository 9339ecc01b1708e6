"""The other ranks of an offline engine, started as children of this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
from multiprocessing.process import BaseProcess

from moe_serve.config import EngineConfig
from moe_serve.errors import MoeServeError
from moe_serve.logs import set_up
from moe_serve.parallel.degrees import RankSeat, local_seat
from moe_serve.parallel.world import LOOPBACK

JOIN_SECONDS = 10.0


class RankProcesses:
    """Ranks 1 to `world_size` - 1; this process is to be rank 0, with `seat` and `init_method`."""

    def __init__(self, config: EngineConfig, world_size: int) -> None:
        self.init_method = f"tcp://{LOOPBACK}:{_free_port()}"
        self.seat = local_seat(0, world_size)
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = [
            context.Process(
                target=_run,
                args=(config, local_seat(rank, world_size), self.init_method),
                name=f"rank-{rank}",
            )
            for rank in range(1, world_size)
        ]
        for process in self._processes:
            process.start()

    def kill(self) -> None:
        """End them at once: rank 0 never came to ask them to."""
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """Wait for their end, which rank 0 has asked for; by force if it takes too long."""
        for process in self._processes:
            process.join(JOIN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        port: int = sock.getsockname()[1]
        return port


def _run(config: EngineConfig, seat: RankSeat, init_method: str) -> None:
    from moe_serve import rank_worker

    set_up("warning", role=f"rank {seat.rank}")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Rank 0 meets the same error and tells of it.
    with contextlib.suppress(MoeServeError):
        rank_worker.run(config, seat, init_method=init_method)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
