"""Host work of decode steps: what an engine's step takes beside the model."""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable
from typing import Any

from moe_serve import model_runner, wire
from moe_serve.config import EngineConfig
from moe_serve.engine import Engine
from moe_serve.engine_loader import load_engine
from moe_serve.messages import AddRequest
from moe_serve.model_path import resolve_model
from moe_serve.sampling_params import SamplingParams

MODEL = ("forward", "logits")
# Steps at either end of a run, where prompts are computed and requests end.
NUM_LEFT_OUT = 4


class Stopwatch:
    """Adds up the seconds spent in wrapped functions. One inside another counts for both."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()

    def wrap(self, name: str, owner: Any, attribute: str) -> None:
        setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return call

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), collections.Counter()
        return taken


def watch(engine: Engine) -> Stopwatch:
    watch, runner = Stopwatch(), engine.executor.runner
    watch.wrap("schedule", engine.scheduler, "schedule")
    watch.wrap("build_batch", model_runner, "build_batch")
    watch.wrap("forward", runner, "_forward")
    watch.wrap("logits", runner.model, "logits")
    watch.wrap("sampler", runner, "sampler")
    watch.wrap("update", engine.scheduler, "update")
    watch.wrap("stats", engine.scheduler, "stats")
    for name in ("before_step", "after_step", "take_stats"):
        watch.wrap("experts", engine.experts, name)
    return watch


def run(engine: Engine, watch: Stopwatch, options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each decode step by part; "step": all of it, with the message's encoding."""
    vocab_size = engine.info.vocab_size
    for number in range(options.requests):
        prompt = [(7 * i + 31 * number) % vocab_size for i in range(options.context)]
        params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        engine.add(
            AddRequest(request_id=f"cmpl-{number:032}-0", prompt_token_ids=prompt, sampling=params)
        )
    encode = watch.timed("encode", wire.encode)
    step = watch.timed("step", lambda: encode(engine.step()))
    found = []
    watch.take()
    while engine.has_work:
        step()
        parts, stats = watch.take(), engine.stats
        if stats.num_scheduled_tokens == stats.num_running == options.requests:
            found.append(parts)
    return found[NUM_LEFT_OUT:-NUM_LEFT_OUT]


def report(options: argparse.Namespace) -> list[str]:
    model = str(resolve_model(options.model, None))
    length = options.context + options.tokens
    engine = load_engine(
        EngineConfig(
            model=model, num_kv_blocks=(length // 16 + 2) * options.requests, max_num_seqs=256
        )
    )
    stopwatch = watch(engine)
    found = [step for _ in range(options.tries) for step in run(engine, stopwatch, options)]
    for step in found:
        step["beside the model"] = step["step"] - sum(step[name] for name in MODEL)
        step["rest"] = step["beside the model"] - sum(
            seconds
            for name, seconds in step.items()
            if name not in (*MODEL, "step", "beside the model")
        )
    title = f"{options.requests} requests, {options.context} + {options.tokens} tokens"
    lines = [f"| decode step: {options.model}, {title} | ms (median of {len(found)}) | share |"]
    lines.append("|---|---|---|")
    whole = statistics.median(step["step"] for step in found)
    for name in sorted(found[0], key=lambda name: -statistics.median(s[name] for s in found)):
        part = statistics.median(step[name] for step in found)
        lines.append(f"| {name} | {part * 1e3:.3f} | {part / whole:.1%} |")
    return lines
