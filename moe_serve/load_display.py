"""How far each rank has read its weights: bars on a terminal, a line a rank elsewhere."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from moe_serve.rank_messages import LoadProgress

logger = logging.getLogger(__name__)


class LoadDisplay:
    """`advance` may come from another thread than `advance_own`, which tells of rank 0."""

    def __init__(self, num_ranks: int, *, is_shown: bool) -> None:
        console = Console(stderr=True)
        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        self._has_bars = is_shown and console.is_terminal
        self._has_lines = is_shown and not console.is_terminal
        self._bars = Progress(*columns, console=console, transient=True, disable=not self._has_bars)
        self._tasks = [
            self._bars.add_task(f"Rank {rank} loads weights", total=None)
            for rank in range(num_ranks)
        ]
        self._told: set[int] = set()
        self._lock = threading.Lock()

    def advance_own(self, bytes_read: int, bytes_needed: int) -> None:
        self.advance(0, LoadProgress(bytes_read=bytes_read, bytes_needed=bytes_needed))

    def advance(self, rank: int, progress: LoadProgress) -> None:
        with self._lock:
            self._bars.update(
                self._tasks[rank], completed=progress.bytes_read, total=progress.bytes_needed
            )
            is_done = progress.bytes_read >= progress.bytes_needed
            if not is_done or rank in self._told:
                return
            self._told.add(rank)
        if self._has_lines:
            logger.info(
                "rank %d has read its %.1f MiB of weights (%d of %d ranks)",
                rank, progress.bytes_read / 2**20, len(self._told), len(self._tasks),
            )  # fmt: skip

    def __enter__(self) -> LoadDisplay:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
