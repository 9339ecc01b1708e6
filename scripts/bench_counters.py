#!/usr/bin/env python3
"""What counting expert choices costs a step: the same requests with and without it, in turns.

    .venv/bin/python scripts/bench_counters.py [--turns N] [--tensor-parallel-size N]

With several ranks experts are spread over them, and a collection asks all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator

from moe_serve import LLM, SamplingParams
from moe_serve.expert_monitor import COLLECT_STEPS

NUM_REQUESTS = 16
NUM_TOKENS = 97


@contextlib.contextmanager
def without_counting(llm: LLM) -> Iterator[None]:
    """Nothing is collected. On one rank, routers count nothing either."""
    monitor, model = llm.engine.experts.monitor, llm.engine.executor.runner.model
    after_step, forward = monitor.after_step, model.forward
    monitor.after_step = lambda *args, **options: None  # type: ignore[method-assign]
    if llm.config.tensor_parallel_size is None:
        model.forward = (  # type: ignore[method-assign]
            lambda ids, context, kv, load, *rest: forward(ids, context, kv, None, *rest)
        )
    try:
        yield
    finally:
        monitor.after_step = after_step  # type: ignore[method-assign]
        model.forward = forward  # type: ignore[method-assign]


def seconds(llm: LLM) -> float:
    """Of a step: a prompt each, then decodes of all requests together."""
    prompts = [[(7 * i + n) % 1000 for i in range(9)] for n in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    return (time.perf_counter() - started) / NUM_TOKENS


def collection(llm: LLM) -> float:
    monitor = llm.engine.experts.monitor
    # As if a step had been.
    monitor._steps = 1
    started = time.perf_counter()
    monitor.collect()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--tensor-parallel-size", type=int, default=None)
    options = parser.parse_args()
    ranks = options.tensor_parallel_size
    with LLM(
        "builtin",
        tensor_parallel_size=ranks,
        enable_expert_parallel=ranks is not None,
        enable_prefix_caching=False,
    ) as llm:
        seconds(llm)
        counted, plain = [], []
        for _ in range(options.turns):
            counted.append(seconds(llm))
            with without_counting(llm):
                plain.append(seconds(llm))
        reads = [collection(llm) for _ in range(50)]
    pairs = [one / other - 1 for one, other in zip(counted, plain, strict=True)]
    print(f"built-in model, {NUM_REQUESTS} requests, {ranks or 1} ranks, {options.turns} turns")
    print(f"  a step with counting       {statistics.median(counted) * 1e3:8.3f} ms")
    print(f"  a step without             {statistics.median(plain) * 1e3:8.3f} ms")
    first, middle, third = (100 * share for share in statistics.quantiles(pairs))
    print(f"  difference, pair by pair   {middle:8.2f} % (quartiles {first:.2f} to {third:.2f})")
    read = statistics.median(reads)
    share = 100 * read / COLLECT_STEPS / statistics.median(counted)
    print(f"  one collection             {read * 1e3:8.3f} ms, every {COLLECT_STEPS} steps:")
    print(f"                             {share:8.3f} % of a step")


if __name__ == "__main__":
    main()
