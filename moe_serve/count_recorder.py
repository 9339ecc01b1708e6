"""Keeps the counts of expert choices window by window, from start to dump."""

from __future__ import annotations

from moe_serve.expert_monitor import LoadSlice, add

# Beyond it neighbouring windows are joined, two by two, and later ones are as long.
MOST_WINDOWS = 1024


class CountRecorder:
    """Windows of `window` steps each; the last may have fewer. Not more than `MOST_WINDOWS`."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._done: list[LoadSlice] = []
        self._open: LoadSlice | None = None

    @property
    def windows(self) -> list[LoadSlice]:
        return self._done if self._open is None else [*self._done, self._open]

    @property
    def num_steps_left(self) -> int:
        """Of the window that is open: then its counts must be collected."""
        return self.window - (0 if self._open is None else self._open.steps)

    def add(self, part: LoadSlice) -> None:
        self._open = part if self._open is None else add(self._open, part)
        if self._open.steps < self.window:
            return
        self._done.append(self._open)
        self._open = None
        if len(self._done) == MOST_WINDOWS:
            pairs = zip(self._done[::2], self._done[1::2], strict=True)
            self._done = [add(first, second) for first, second in pairs]
            self.window *= 2
