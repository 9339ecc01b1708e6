"""Steps without and with probes by turns, and what the probes saw."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from moe_serve.bench.ruler import Clock
from moe_serve.bench.step.breakdown import Overhead
from moe_serve.bench.step.load import Load, take_step
from moe_serve.bench.step.probes import Event, Recorder
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
    """`num_steps` pairs of steps; which of a pair comes first alternates.

    `recorder` is the one that `answerer` records to, if it does.
    """
    load.prepare(engine, num_warm_up + 2 * num_steps)
    answerer.follow(load.requests)
    for _ in range(num_warm_up):
        load.before_step(engine)
        take_step(engine)
    targets = engine_targets(engine)
    pairs, steps, served = [], [], []

    def plain_step() -> float:
        load.before_step(engine)
        began = clock()
        take_step(engine)
        return (clock() - began) / 1e3

    def probed_step() -> float:
        known = load.requests
        load.before_step(engine)
        recorder.take()
        with recorder.probing(targets):
            began = clock()
            outputs = take_step(engine)
            took = clock() - began
        steps.append(recorder.take())
        if load.requests is not known:
            answerer.bring(load.requests)
        answerer.answer(outputs)
        served.append(recorder.take())
        return took / 1e3

    for number in range(num_steps):
        if number % 2 == 0:
            pairs.append((plain_step(), probed_step()))
        else:
            probed = probed_step()
            pairs.append((plain_step(), probed))
    return Measured(overhead=Overhead.of(pairs), steps=steps, served=served)
