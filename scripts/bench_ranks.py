"""What ranks cost on one machine's CPU: tokens a second of `LLM` for several arrangements.

    .venv/bin/python scripts/bench_ranks.py [--model builtin] [--rounds 5] [--prompts 16] ...

All arrangements use as many threads in all as there are cores; rounds over them are interleaved. On
one CPU ranks share the cores that one rank would use alone, so this shows what the
exchange costs, and which arrangement to take where a model is served by several ranks anyway.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import sys
import time

import torch

from moe_serve import LLM, SamplingParams

ARRANGEMENTS: dict[str, dict[str, object]] = {
    "one rank": {},
    "2 lanes": {"data_parallel_size": 2},
    "2 lanes, experts spread": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "1 lane of 2": {"tensor_parallel_size": 2},
    "1 lane of 2, experts spread": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "1 lane of 2, deterministic": {"tensor_parallel_size": 2, "deterministic": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    speeds: dict[str, list[float]] = {name: [] for name in ARRANGEMENTS}
    for _ in range(args.rounds):
        for name, options in ARRANGEMENTS.items():
            with _load(args.model, cores, options) as llm:
                # The first time touches memory anew.
                speeds[name].append([_tokens_per_second(llm, n, args) for n in range(3)][-1])
    print(f"{datetime.date.today()} · {platform.machine()}, {cores} cores · torch "
          f"{torch.__version__} · `{shlex.join(sys.argv)}`\n")  # fmt: skip
    print("| arrangement | output tok/s | [least, most] | ratio to one rank |\n|---|---|---|---|")
    base = statistics.median(speeds["one rank"])
    for name, found in speeds.items():
        median = statistics.median(found)
        spread = f"[{min(found):.0f}, {max(found):.0f}]"
        print(f"| {name} | {median:.0f} | {spread} | {median / base:.2f} |")


def _load(model: str, cores: int, options: dict[str, object]) -> LLM:
    ranks = int(str(options.get("tensor_parallel_size", 1)))
    ranks *= int(str(options.get("data_parallel_size", 1)))
    threads = max(1, cores // ranks)
    return LLM(model, num_threads=threads, enable_prefix_caching=False, **options)


def _tokens_per_second(llm: LLM, number: int, args: argparse.Namespace) -> float:
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    prompts = [
        [(7 * i + 31 * prompt + number) % 256 for i in range(args.input_len)]
        for prompt in range(args.prompts)
    ]
    began = time.perf_counter()
    llm.generate(prompts, params)
    return args.prompts * args.output_len / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
