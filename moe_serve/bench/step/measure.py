"""Steps without and with probes by turns, and what the probes saw."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

from moe_serve.bench.ruler import Clock
from moe_serve.bench.step.breakdown import Overhead
from moe_serve.bench.step.load import Load, take_step
from moe_serve.bench.step.probes import Event, Recorder, probe_us
from moe_serve.bench.step.targets import engine_targets
from moe_serve.engine import Engine
from moe_serve.messages import AddRequest, EngineOutputs


class Answerer:
    """What a server does with the messages of a step; this one does nothing. Recorded elsewhere."""

    def follow(self, requests: Sequence[AddRequest]) -> None:
        """Of these, outputs will come."""

    def bring(self, requests: Sequence[AddRequest]) -> None:
        """The same, and they are new."""

    def answer(self, outputs: EngineOutputs) -> list[bytes]:
        return []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`steps` and `served`: the events of each probed step, and of what a server does with it."""

    overhead: Overhead
    steps: list[list[Event]]
    served: list[list[Event]]


def measure(
    engine: Engine,
    load: Load,
    *,
    num_steps: int,
    num_warm_up: int,
    answerer: Answerer,
    recorder: Recorder,
    clock: Clock = time.perf_counter_ns,
) -> Measured:
    """`num_steps` pairs of steps; which of a pair comes first alternates, and before each is one
    of its kind that does not count.

    `recorder` is the one that `answerer` records to, if it does.
    """
    load.prepare(engine, num_warm_up + 4 * num_steps)
    answerer.follow(load.requests)
    taker = _Taker(engine, load, answerer, recorder, clock)
    for _ in range(num_warm_up):
        taker.step()
    pairs = []
    for number in range(num_steps):
        if number % 2 == 0:
            pairs.append((taker.plain_step(), taker.probed_step()))
        else:
            probed = taker.probed_step()
            pairs.append((taker.plain_step(), probed))
    overhead = Overhead.of(
        pairs,
        num_probes=statistics.fmean(map(len, taker.steps)),
        probe_us=probe_us(clock),
    )
    return Measured(overhead=overhead, steps=taker.steps, served=taker.served)


class _Taker:
    """Takes one step after the other; `steps` and `served` as in `Measured`."""

    def __init__(
        self, engine: Engine, load: Load, answerer: Answerer, recorder: Recorder, clock: Clock
    ) -> None:
        self.steps: list[list[Event]] = []
        self.served: list[list[Event]] = []
        self._engine, self._load = engine, load
        self._answerer, self._recorder, self._clock = answerer, recorder, clock
        self._targets = engine_targets(engine)

    def step(self) -> tuple[float, EngineOutputs]:
        """Microseconds, and what came of it."""
        self._load.before_step(self._engine)
        began = self._clock()
        outputs = take_step(self._engine)
        return (self._clock() - began) / 1e3, outputs

    def plain_step(self) -> float:
        """Microseconds; so the other. Of the second of two: the first finds caches, of the
        processor and of the interpreter, that know another way.
        """
        self.step()
        return self.step()[0]

    def probed_step(self) -> float:
        load, recorder, answerer = self._load, self._recorder, self._answerer
        with recorder.probing(self._targets):
            self.step()
            recorder.take()
            known = load.requests
            took, outputs = self.step()
        self.steps.append(recorder.take())
        if load.requests is not known:
            answerer.bring(load.requests)
        answerer.answer(outputs)
        self.served.append(recorder.take())
        return took
