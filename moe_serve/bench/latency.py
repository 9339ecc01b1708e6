"""`moe-serve bench latency`: one batch of requests through the engine, again and again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moe_serve.bench import offline
from moe_serve.bench.engine_options import read_engine_config
from moe_serve.bench.ruler import Clock
from moe_serve.bench.table import Table
from moe_serve.engine import Engine
from moe_serve.errors import ConfigError, EngineError
from moe_serve.llm import LLM
from moe_serve.messages import EngineOutputs
from moe_serve.sampling_params import SamplingParams

EPILOG = """\
All requests of a batch come at once, and the next batch when all of them have ended. E2EL is of the
whole batch; TTFT and TPOT are means over its requests. Prompts are random tokens, other ones in
each iteration."""
RANKS = (10, 25, 50, 75, 90, 99)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Seconds. `seconds`: until all had ended. Means over requests: `ttft` until the first token,
    `tpot` between one token and the next; 0 where there is only one.
    """

    seconds: float
    ttft: float
    tpot: float


class TokenLog:
    """When each request of an engine got its tokens, by the clock; one step gives many at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.times: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        step = engine.step

        def watched() -> EngineOutputs:
            outputs = step()
            now = self._clock()
            for update in outputs.updates:
                times = self.times.setdefault(update.request_id, [])
                times += [now] * len(update.token_ids)
            return outputs

        engine.step = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine.step = step  # type: ignore[method-assign]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    offline.add_arguments(
        parser,
        {
            "batch_size": (8, "requests at once"),
            "input_len": (32, "tokens of a prompt"),
            "output_len": (128, "tokens to generate for each"),
            "num_iters_warmup": (2, "iterations before those that count"),
            "num_iters": (10, "iterations"),
        },
    )


def run(args: argparse.Namespace) -> int:
    """Print percentiles over the iterations; returns the exit code."""
    names = ("batch_size", "input_len", "output_len", "num_iters")
    offline.check_at_least(args, 1, *names)
    offline.check_at_least(args, 0, "num_iters_warmup", "seed")
    config = read_engine_config(args, prog="moe-serve bench latency")
    if args.batch_size > config.max_num_seqs * config.data_parallel_size:
        raise ConfigError(
            f"--batch-size {args.batch_size} is more than --max-num-seqs {config.max_num_seqs}, so "
            "that some would wait for others; raise that"
        )
    with LLM(**config.engine_options()) as llm:
        print(offline.headline(llm.config, llm.engine.info), flush=True)
        iterations = measure(
            llm,
            batch_size=args.batch_size,
            input_len=args.input_len,
            output_len=args.output_len,
            num_warm_up=args.num_iters_warmup,
            num_iterations=args.num_iters,
            seed=args.seed,
        )
        facts = offline.about(llm.config, llm.engine.info)
    facts["arguments"] = {name: getattr(args, name) for name in (*names, "seed")}
    print(table(iterations))
    results = [dataclasses.asdict(one) for one in iterations]
    offline.write_json(args.output_json, facts | {"iterations": results} | summary(iterations))
    return 0


def measure(
    llm: LLM,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    num_iterations: int,
    num_warm_up: int = 0,
    seed: int = 0,
    clock: Clock = time.perf_counter_ns,
) -> list[Iteration]:
    info = llm.engine.info
    offline.check_fits(info, input_len, output_len)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_warm_up + num_iterations):
        prompts = offline.random_prompts(rng, batch_size, input_len, info.vocab_size)
        found.append(_iterate(llm, prompts, output_len, clock))
    return found[num_warm_up:]


def _iterate(llm: LLM, prompts: Sequence[list[int]], output_len: int, clock: Clock) -> Iteration:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    log = TokenLog(clock)
    began = clock()
    with log.watching(llm.engine):
        results = llm.generate(prompts, params)
    seconds = (clock() - began) / 1e9
    for result in results:
        if result.outputs[0].finish_reason == "error":
            raise EngineError(result.outputs[0].error)
    return Iteration(
        seconds=seconds,
        ttft=statistics.fmean((times[0] - began) / 1e9 for times in log.times.values()),
        tpot=statistics.fmean(map(time_per_output_token, log.times.values())),
    )


def time_per_output_token(times: Sequence[int]) -> float:
    """Seconds between tokens after the first, on average; of a single token 0."""
    return (times[-1] - times[0]) / 1e9 / max(1, len(times) - 1)


def summary(iterations: Sequence[Iteration]) -> dict[str, Any]:
    """Mean and percentiles of each measure, in seconds."""
    found: dict[str, Any] = {}
    for name, attribute in (("e2el", "seconds"), ("ttft", "ttft"), ("tpot", "tpot")):
        samples = [getattr(one, attribute) for one in iterations]
        found[name] = {"mean": statistics.fmean(samples)} | offline.percentiles(samples, RANKS)
    return found


def table(iterations: Sequence[Iteration]) -> str:
    columns = summary(iterations)
    rows = Table([f"ms, {len(iterations)} iterations", "E2EL", "TTFT", "TPOT"])
    for rank in ("mean", *(f"p{rank}" for rank in RANKS)):
        rows.add(rank, *(f"{1e3 * column[rank]:.2f}" for column in columns.values()))
    return str(rows)
