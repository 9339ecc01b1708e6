"""Where the time of a step goes: probes that leave no trace, times that add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.bench.step import command, serving, targets
from moe_serve.bench.step.breakdown import Overhead, in_order, part_times, parts_table
from moe_serve.bench.step.chrome_trace import chrome_trace
from moe_serve.bench.step.load import DecodeLoad, PrefillLoad
from moe_serve.bench.step.measure import Answerer, Measured, measure
from moe_serve.bench.step.probes import Event, Recorder, Target, probe_us
from moe_serve.bench.step.serving import ServedStep
from moe_serve.bench.step.targets import engine_targets
from moe_serve.cli import main
from moe_serve.config import EngineConfig
from moe_serve.engine import Engine
from moe_serve.errors import ConfigError
from moe_serve.llm import LLM


class Hands:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Nested:
    """Each call takes 1, and calls what is below it."""

    def __init__(self, hands: Hands, *below: Nested) -> None:
        self.hands = hands
        self.below = below

    def run(self) -> str:
        self.hands.now += 1
        for one in self.below:
            one.run()
        return "done"


def test_own_time_is_without_the_probed_calls_inside() -> None:
    hands = Hands()
    leaves = [Nested(hands), Nested(hands)]
    top = Nested(hands, Nested(hands, *leaves))
    recorder = Recorder(hands)
    # What lies between is not probed: its time is the top's own.
    with recorder.probing(
        [Target(top, "run", "top"), *(Target(leaf, "run", "leaf", "name") for leaf in leaves)]
    ):
        assert top.run() == "done"
    assert recorder.take() == [
        Event("leaf", "name", 2, 3, 1),
        Event("leaf", "name", 3, 4, 1),
        Event("top", "top", 0, 4, 2),
    ]
    assert recorder.take() == []


@given(
    st.recursive(st.just(()), lambda below: st.lists(below, max_size=3).map(tuple), max_leaves=20)
)
def test_own_times_add_up_to_the_whole(shape: tuple[Any, ...]) -> None:
    hands = Hands()
    found: list[Target] = []

    def build(shape: tuple[Any, ...]) -> Nested:
        one = Nested(hands, *map(build, shape))
        found.append(Target(one, "run", "part"))
        return one

    top, recorder = build(shape), Recorder(hands)
    with recorder.probing(found):
        top.run()
    events = recorder.take()
    assert len(events) == len(found)
    assert sum(event.own_ns for event in events) == events[-1].stop_ns - events[-1].start_ns


def test_probes_are_gone_afterwards_also_after_an_error() -> None:
    hands = Hands()
    inherited, module = Nested(hands), torch.nn.Linear(1, 1)
    own = Nested(hands)
    own.run = replaced = lambda: 1 / 0  # type: ignore[method-assign]
    wanted = [
        Target(one, name, "part")
        for one, name in ((inherited, "run"), (own, "run"), (module, "forward"))
    ]
    recorder = Recorder(hands)
    with pytest.raises(ZeroDivisionError), recorder.probing(wanted):
        module(torch.ones(1, 1))
        own.run()
    assert "run" not in vars(inherited) and "forward" not in vars(module)
    assert own.run is replaced
    assert [event.part for event in recorder.take()] == ["part", "part"]


def test_parts_have_medians_of_steps_and_shares_of_all() -> None:
    def step(a: int, b: int) -> list[Event]:
        return [Event("a", "a", 0, a, a), Event("b", "b", 0, b, b), Event("a", "a", 0, a, a)]

    a, b = part_times([step(1000, 2000), step(2000, 1000), step(3000, 9000)])
    assert (a.part, a.calls_per_step, a.us.median, a.share) == ("a", 2.0, 4.0, 0.5)
    assert (b.part, b.calls_per_step, b.us.median, b.share) == ("b", 1.0, 2.0, 0.5)
    assert [one.part for one in in_order([a, b], ["x", "b"])] == ["b", "a"]
    table = parts_table("part", [a, b])
    assert table.splitlines()[-1].split() == "| sum | | 6.0 | | 100.0% |".split()
    (half,) = part_times([[Event("c", "c", 0, 1, 6)]], total_ns=12)
    assert half.share == 0.5


def test_what_probes_add_is_told_pair_by_pair() -> None:
    pairs = [(100.0, 101.0), (200.0, 204.0), (50.0, 51.5)]
    overhead = Overhead.of(pairs, num_probes=20, probe_us=0.25)
    assert overhead.ratio.median == 1.02
    assert "probes add 2.0 % [1.5, 2.5]" in str(overhead)
    assert "20 probes of 0.25 us: 5.0% of a step" in str(overhead)


def test_a_probe_costs_what_its_looks_at_the_clock_take() -> None:
    hands = Hands()

    def clock() -> int:
        hands.now += 1000
        return hands.now

    # Two looks more than without a probe, a microsecond each.
    assert probe_us(clock) == pytest.approx(2.0, rel=0.02)


def test_a_trace_has_what_a_viewer_needs_of_each_event() -> None:
    tracks = {
        "engine": [Event("in", "in 3", 2000, 3000, 1000), Event("out", "out", 1500, 4000, 1500)],
        "server": [],
    }
    trace = json.loads(json.dumps(chrome_trace(tracks, "bench")))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"bench", "engine", "server"}
    outer, inner = (event for event in trace["traceEvents"] if event["ph"] == "X")
    assert (outer["name"], outer["ts"], outer["dur"]) == ("out", 0.0, 2.5)
    assert (inner["name"], inner["cat"], inner["ts"], inner["dur"]) == ("in 3", "in", 0.5, 1.0)
    assert outer["pid"] == inner["pid"] and outer["tid"] == inner["tid"] == 1


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "builtin", device="cpu", num_threads=1, kv_cache_memory="8MiB", enable_prefix_caching=False
    ) as llm:
        yield llm
        llm.engine.scheduler.check_integrity()


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    yield llm.engine
    llm.engine.abort(llm.engine.scheduler.request_ids)


def look(engine: Engine, load: DecodeLoad | PrefillLoad, tokenizer: Any = None) -> Measured:
    recorder = Recorder()
    answerer = ServedStep(tokenizer, recorder) if tokenizer else Answerer()
    return measure(engine, load, num_steps=2, num_warm_up=1, answerer=answerer, recorder=recorder)


def test_each_decode_step_is_of_the_whole_batch_at_that_context(llm: LLM, engine: Engine) -> None:
    plans = []
    run = engine.executor.run

    def watched(plan: Any) -> Any:
        plans.append([(chunk.start, chunk.num_tokens) for chunk in plan.chunks])
        return run(plan)

    load = DecodeLoad(batch_size=3, context=17, rng=np.random.default_rng(0))
    recorder = Recorder()
    load.prepare(engine, 2)
    engine.executor.run = watched  # type: ignore[method-assign]
    try:
        for _ in range(2):
            engine.step()
    finally:
        del engine.executor.run
    # The token at position 16 sees 17.
    assert plans == [[(16, 1)] * 3, [(17, 1)] * 3]
    assert recorder.events == []


def test_a_decode_step_has_every_part_and_each_layer_once(llm: LLM, engine: Engine) -> None:
    load = DecodeLoad(batch_size=2, context=7, rng=np.random.default_rng(0))
    measured = look(engine, load, llm.tokenizer)
    assert len(measured.steps) == len(measured.served) == 2
    layers = len(engine.executor.runner.model.layers)
    for events in measured.steps:
        calls = Counter(event.part for event in events)
        assert calls.keys() <= set(targets.PARTS)
        assert calls["schedule"] == calls["update"] == calls["head"] == calls["sampling"] == 1
        assert calls["attention: qkv"] == calls["MoE: experts"] == calls["MoE: router"] == layers
        assert events[-1].part == targets.STEP
        assert sum(event.own_ns for event in events) == events[-1].stop_ns - events[-1].start_ns
    for events in measured.served:
        assert [event.part for event in events] == [
            serving.SEND_OUTPUTS, serving.READ_OUTPUTS, serving.DETOKENIZE, serving.FORMAT,
        ]  # fmt: skip


def test_each_prefill_is_a_new_prompt_whose_message_is_read_too(llm: LLM, engine: Engine) -> None:
    load = PrefillLoad(num_tokens=9, rng=np.random.default_rng(0))
    measured = look(engine, load, llm.tokenizer)
    # One to warm up, and before each of four that count one that does not.
    assert load.count == 9 and not engine.has_work
    assert [event.part for event in measured.served[0]] == [
        serving.SEND_REQUEST, serving.READ_REQUEST, serving.SEND_OUTPUTS, serving.READ_OUTPUTS,
        serving.DETOKENIZE, serving.FORMAT,
    ]  # fmt: skip


def test_an_engine_is_as_before(llm: LLM, engine: Engine) -> None:
    before = {owner: dict(vars(owner)) for owner, *_ in engine_targets(engine)}
    look(engine, PrefillLoad(num_tokens=1, rng=np.random.default_rng(0)))
    for owner, attributes in before.items():
        assert vars(owner).keys() == attributes.keys()
    assert llm.generate([[1, 2, 3]])[0].outputs[0].finish_reason in ("stop", "length")


def test_steps_are_made_to_fit_and_what_cannot_is_refused(llm: LLM, engine: Engine) -> None:
    rng = np.random.default_rng(0)
    fitted = DecodeLoad(batch_size=100, context=300, rng=rng).fitting(EngineConfig())
    assert (fitted.max_num_seqs, fitted.max_num_batched_tokens) == (100, 30000)
    most = engine.info.max_model_len
    with pytest.raises(ConfigError, match=f"--context {most} and 3 steps are more"):
        DecodeLoad(batch_size=1, context=most, rng=rng).prepare(engine, 3)
    with pytest.raises(ConfigError, match="raise --kv-cache-memory"):
        DecodeLoad(batch_size=10**6, context=9, rng=rng).prepare(engine, 3)
    with pytest.raises(ConfigError, match=f"--prefill {most} must be below the context"):
        PrefillLoad(num_tokens=most, rng=rng).prepare(engine, 3)


def test_the_command_prints_parts_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, results = tmp_path / "trace.json", tmp_path / "out.json"
    argv = ["bench", "step", "--batch", "2", "--context", "5", "--serve", "--num-iters", "2",
            "--num-threads", "1", "--kv-cache-memory", "8MiB", "--trace", str(trace),
            "--output-json", str(results)]  # fmt: skip
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "decode of 2 requests, context 5" in printed and "probes add" in printed
    assert serving.FORMAT in printed
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}
    found = json.loads(results.read_text())
    assert sum(one["share"] for one in found["parts"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--prefill", "5", "--context", "4"], "--context has no effect with --prefill"),
        (["--context", "1"], "--context 1 must be at least 2"),
        (["--tp", "2"], "one rank can be looked into, not 2"),
    ],
)
def test_what_cannot_be_looked_into_is_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *argv]) == 2
    assert told in capsys.readouterr().err


def test_a_gpu_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "pick_device", lambda name: torch.device("cuda"))
    assert main(["bench", "step"]) == 2
    assert "give --device cpu" in capsys.readouterr().err
