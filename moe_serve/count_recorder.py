"""Keeps the counts of expert choices window by window, from start to dump."""

from __future__ import annotations

from moe_serve.expert_monitor import LoadSlice, add

MOST_WINDOWS = 1024
# Of the counts of all windows; to write them takes several times that for a moment.
MOST_BYTES = 64 * 2**20


class CountRecorder:
    """Windows of `window` steps each; the last may have fewer.

    As many are kept as `MOST_WINDOWS` and `MOST_BYTES` allow: beyond that neighbours are joined,
    two by two, and later ones are as long, so that any number of steps can be recorded.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        # Steps of a window by now.
        self._length = window
        self._done: list[LoadSlice] = []
        self._open: LoadSlice | None = None

    @property
    def windows(self) -> list[LoadSlice]:
        return self._done if self._open is None else [*self._done, self._open]

    @property
    def num_steps_left(self) -> int:
        """Of the window that is open: then its counts must be collected."""
        return self._length - (0 if self._open is None else self._open.steps)

    def add(self, part: LoadSlice) -> None:
        self._open = part if self._open is None else add(self._open, part)
        if self._open.steps < self._length:
            return
        self._done.append(self._open)
        self._open = None
        if len(self._done) >= _most_windows(part):
            pairs = zip(self._done[::2], self._done[1::2], strict=True)
            self._done = [add(first, second) for first, second in pairs]
            self._length *= 2


def _most_windows(part: LoadSlice) -> int:
    """An even number."""
    num_bytes = part.counts_LCE.nbytes + part.rows_LR.nbytes
    return max(2, min(MOST_WINDOWS, MOST_BYTES // max(1, num_bytes)) // 2 * 2)
