"""Probes: functions of objects, timed for a while, without a line of theirs being changed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moe_serve.bench.ruler import Clock, compare


class Event(NamedTuple):
    """One call. Nanoseconds by the clock; `own_ns`: without the probed calls inside it."""

    part: str
    label: str
    start_ns: int
    stop_ns: int
    own_ns: int


class Target(NamedTuple):
    """`owner.attribute` is called; its own time counts for `part`, and it is shown as `label`.

    An owner is any object or module whose caller looks the function up there each time. Of a
    torch module, that is `forward`.
    """

    owner: Any
    attribute: str
    part: str
    label: str = ""


class Recorder:
    """Events of what it wraps, each when it ends. One thread."""

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self.events: list[Event] = []
        self._clock = clock
        # Of each call that runs, what probed calls inside it took.
        self._inside: list[int] = []

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self.events = self.events, []
        return events

    def timed(self, function: Callable[..., Any], part: str, label: str = "") -> Any:
        """`function`, recorded each time it is called, also where it raises."""
        clock, inside, name = self._clock, self._inside, label or part

        @functools.wraps(function, updated=())
        def probe(*args: Any, **kwargs: Any) -> Any:
            inside.append(0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                stop = clock()
                took = stop - start
                own = took - inside.pop()
                if inside:
                    inside[-1] += took
                self.events.append(Event(part, name, start, stop, own))

        return probe

    @contextlib.contextmanager
    def probing(self, targets: Sequence[Target]) -> Iterator[None]:
        """Inside, each target is timed; afterwards all is as it was."""
        with contextlib.ExitStack() as undo:
            for owner, attribute, part, label in targets:
                undo.callback(_restorer(owner, attribute))
                setattr(owner, attribute, self.timed(getattr(owner, attribute), part, label))
            yield


def probe_us(clock: Clock = time.perf_counter_ns) -> float:
    """What one probe adds to what it times."""
    recorder = Recorder(clock)

    def nothing() -> None:
        pass

    found = compare([nothing], [recorder.timed(nothing, "part")], pairs=21, clock=clock)
    return found.theirs.median - found.ours.median


def _restorer(owner: Any, attribute: str) -> Callable[[], None]:
    """What puts an attribute back: the owner's own, or none where its class has it."""
    if attribute in vars(owner):
        return functools.partial(setattr, owner, attribute, getattr(owner, attribute))
    return functools.partial(delattr, owner, attribute)
