"""Recordings of expert choices, from start to dump: counts by window, or each token's routes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_serve.count_recorder import CountRecorder
from moe_serve.errors import RecordingError
from moe_serve.expert_monitor import ExpertMonitor, LoadSlice
from moe_serve.experts.files.load_files import write_load
from moe_serve.experts.files.route_files import write_routes
from moe_serve.experts.placement import Placement
from moe_serve.route_recorder import RouteRecorder
from moe_serve.step import ChunkResult, StepPlan


class ExpertRecorder:
    """One recording at a time; what it holds is kept when it stops, until it is dumped or another
    one starts. Files go to `folder`. Counts must be collected before each of its methods.
    """

    def __init__(self, monitor: ExpertMonitor, folder: Path) -> None:
        self._monitor = monitor
        self._folder = folder.expanduser().absolute()
        self._counts: CountRecorder | None = None
        self._routes: RouteRecorder | None = None
        self._is_on = False

    @property
    def is_recording(self) -> bool:
        """A recording of routes ends by itself when it is full."""
        return self._is_on and (self._routes is None or self._routes.is_recording)

    @property
    def records_routes(self) -> bool:
        return self._routes is not None and self.is_recording

    @property
    def num_steps_left(self) -> int | None:
        """Until counts must be collected, for a window to end there; None: it does not matter."""
        return self._counts.num_steps_left if self._counts is not None and self._is_on else None

    def add(self, part: LoadSlice) -> None:
        if self._counts is not None and self._is_on:
            self._counts.add(part)

    def observe(self, plan: StepPlan, results: Sequence[ChunkResult]) -> None:
        if self._routes is not None and self._is_on:
            self._routes.observe(plan, results)

    def start(self, mode: str, window: int) -> None:
        """Raises `RecordingError` while another one is on."""
        if self.is_recording:
            raise RecordingError("a recording is on its way; stop it first")
        self._counts = CountRecorder(window) if mode == "counts" else None
        self._routes = None if mode == "counts" else _started_routes()
        self._is_on = True

    def stop(self) -> None:
        """Raises `RecordingError` where nothing was started."""
        self._check_any()
        self._is_on = False
        if self._routes is not None:
            self._routes.stop()

    def dump(self, style: str, placement: Placement | None) -> dict[str, Any]:
        """Write what there is, and go on with nothing; tells the path.

        The folder is made where it is missing. Raises `RecordingError` where the file cannot be
        written: then nothing of it is lost.
        """
        self._check_any()
        is_recording = self.is_recording
        name = f"experts-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.{style}"
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(f"{path} cannot be written: {error.strerror or error}") from error
        if self._routes is not None:
            told = self._dump_routes(self._routes, path, style)
            self._routes = _started_routes() if is_recording else RouteRecorder()
        else:
            assert self._counts is not None
            windows = self._counts.windows
            write_load(self._monitor.to_recording(windows, placement), path)
            told = {"mode": "counts", "num_windows": len(windows)}
            self._counts = CountRecorder(self._counts.window)
        return {"path": str(path), **told, "is_recording": is_recording}

    def _dump_routes(self, routes: RouteRecorder, path: Path, style: str) -> dict[str, Any]:
        if style != "npz":
            raise RecordingError(f"routes are written as npz only, not as {style}")
        recording = routes.recording(self._monitor.facts.name, self._monitor.num_experts)
        write_routes(recording, path)
        return {"mode": "routes", "num_tokens": recording.num_tokens, "is_full": routes.is_full}

    def _check_any(self) -> None:
        if self._counts is None and self._routes is None:
            raise RecordingError("nothing is recorded; start a recording first")


def _started_routes() -> RouteRecorder:
    recorder = RouteRecorder()
    recorder.start()
    return recorder
