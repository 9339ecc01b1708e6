"""Requests in the order in which they deserve to run."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from moe_serve.request import Request

LOOK_AHEAD = 8
MAX_OVERTAKES = 16


def _queue_key(request: Request) -> tuple[int, int]:
    return request.queue_key


class RequestQueue:
    """Requests sorted by `queue_key`, that is by priority, then by arrival.

    A sorted list: even with 10,000 requests an insertion or a removal moves 80 kB at most,
    which takes microseconds; new arrivals of equal priority are appended at the end.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def last(self) -> Request:
        """The one that deserves least to run: lowest priority, and of these the youngest."""
        return self._requests[-1]

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=_queue_key)

    def remove(self, request: Request) -> None:
        del self._requests[self._position(request)]

    def _position(self, request: Request) -> int:
        position = bisect.bisect_left(self._requests, request.queue_key, key=_queue_key)
        assert self._requests[position] is request
        return position


class WaitingQueue(RequestQueue):
    """Requests that wait for blocks, with bounded overtaking.

    A request that does not fit now lets smaller ones behind it go first, since they would
    otherwise wait for nothing. Two bounds keep this fair and cheap:

    - `MAX_OVERTAKES` (16): so many requests may start before one that came first. Then nothing
      behind it starts until it has started itself; the running ones end, so its blocks come free.
    - `LOOK_AHEAD` (8): only so many requests at the front are tried, however long the queue is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_overtakes: dict[str, int] = {}

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._num_overtakes.pop(request.request_id, None)

    def pop_first(self, fits: Callable[[Request], bool]) -> Request | None:
        """Take out the first request that fits and may start now; None if there is none."""
        passed: list[Request] = []
        for request in self._requests[:LOOK_AHEAD]:
            if fits(request):
                self.remove(request)
                for other in passed:
                    self._num_overtakes[other.request_id] = self._num_overtaken(other) + 1
                return request
            if self._num_overtaken(request) >= MAX_OVERTAKES:
                return None
            passed.append(request)
        return None

    def _num_overtaken(self, request: Request) -> int:
        return self._num_overtakes.get(request.request_id, 0)
