#!/usr/bin/env python3
"""What counting expert choices costs a step: the same requests with and without it, in turns.

    .venv/bin/python scripts/bench_counters.py [--turns N] [--tensor-parallel-size N]

With several ranks experts are spread over them, and a collection asks all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from moe_serve import LLM, SamplingParams
from moe_serve.bench.ruler import compare, time_calls
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


def generate(llm: LLM) -> None:
    """A step of all prompts, then decodes of all requests together: NUM_TOKENS steps."""
    prompts = [[(7 * i + n) % 1000 for i in range(9)] for n in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm.generate(prompts, params)


def generate_uncounted(llm: LLM) -> None:
    with without_counting(llm):
        generate(llm)


def collect(llm: LLM) -> None:
    monitor = llm.engine.experts.monitor
    # As if a step had been.
    monitor._steps = 1
    monitor.collect()


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
        found = compare(
            [lambda: generate_uncounted(llm)], [lambda: generate(llm)], pairs=options.turns
        )
        read = time_calls([lambda: collect(llm)]).median / 1e3
    plain, counted = (one.median / 1e3 / NUM_TOKENS for one in (found.ours, found.theirs))
    first, middle, third = sorted(100 * (share - 1) for share in found.ratio)
    print(f"built-in model, {NUM_REQUESTS} requests, {ranks or 1} ranks, {options.turns} turns")
    print(f"  a step with counting       {counted:8.3f} ms")
    print(f"  a step without             {plain:8.3f} ms")
    print(f"  difference, pair by pair   {middle:8.2f} % (quartiles {first:.2f} to {third:.2f})")
    print(f"  one collection             {read:8.3f} ms, every {COLLECT_STEPS} steps:")
    print(f"                             {100 * read / COLLECT_STEPS / counted:8.3f} % of a step")


if __name__ == "__main__":
    main()
