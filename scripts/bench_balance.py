"""How even expert placements are, and how fast they are made: linear, published, ours.

    .venv/bin/python scripts/bench_balance.py [folder of *_counts.json] [--rounds 3]

`published` is DeepSeek's EPLB, written anew as plain Python over torch, one thread, in
balance_bench/published.py. Balancedness is mean over ranks / max over ranks of a layer, as mean and
minimum over the layers of all loads of a row.

- bound: no placement is more even than this on average.
- lower: layers where ours is less even than published.
- repeats: slots of the published placement whose expert their rank has already.
- ms: for all loads of a row, medians of interleaved rounds, first and third quartile in brackets.

A second table moves at most so many slots, away from the linear placement. Ends with 1 if any layer
is lower, or if ours is not 20 times as fast at the largest size (on nodes with groups excepted).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from balance_bench.compare import Case, Floats, Result, compare
from balance_bench.loads import LoadSet, recorded_sets, zipf_set
from balance_bench.published import matches_worked_example

from moe_serve.bench.processor import processor_name
from moe_serve.bench.ruler import Spread
from moe_serve.experts.analysis.load_statistics import balancedness, rank_loads
from moe_serve.experts.balance import BalanceGoal, balance
from moe_serve.experts.placement import Placement, slots_of_ranks

COLUMNS = (
    "loads", "ranks", "redundant", "linear", "published", "ours", "bound", "lower", "repeats",
    "published ms", "ours ms", "ratio",
)  # fmt: skip
FASTER = 20
RANKS = (2, 4, 8, 16, 32)
REDUNDANT = (0, 8, 16, 32)
LARGEST = {"num_layers": 61, "num_experts": 256}
SKEWS = (0.0, 0.4, 0.8, 1.0, 1.2, 1.5)
BUDGETS = (0, 1, 2, 4, 8, 16, 32, 100)
EXAMPLE = "eplb_readme_example.json"


def largest_cases() -> Iterator[Case]:
    for skew in SKEWS:
        load_set = zipf_set(skew, seeds=(0, 1), **LARGEST)
        yield Case(load_set, num_ranks=32, num_redundant=32)


def group_cases() -> Iterator[Case]:
    for skew in (0.4, 0.8):
        load_set = zipf_set(skew, seeds=(0,), **LARGEST)
        yield Case(load_set, num_ranks=32, num_redundant=32, num_groups=8, num_nodes=4)


def other_cases(folder: Path | None) -> Iterator[Case]:
    sets = [zipf_set(skew, 26, 64, seeds=(0,)) for skew in (0.4, 1.2)]
    sets += recorded_sets(folder) if folder else []
    for load_set, num_ranks, num_redundant in itertools.product(sets, RANKS, REDUNDANT):
        case = Case(load_set, num_ranks, num_redundant)
        if case.is_feasible:
            yield case


def line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def even(balancedness_L: Floats) -> str:
    return f"{balancedness_L.mean():.4f} / {balancedness_L.min():.4f}"


def spread(seconds: list[float]) -> str:
    return str(Spread.of([1e3 * s for s in seconds]))


def row(case: Case, result: Result) -> str:
    nodes = f", {case.num_groups} groups on {case.num_nodes} nodes" if case.num_nodes > 1 else ""
    return line(
        case.load_set.name + nodes,
        case.num_ranks,
        case.num_redundant,
        even(result.linear),
        even(result.published),
        even(result.ours),
        f"{result.possible.mean():.4f}",
        result.num_lower,
        result.num_repeats,
        spread(result.published_seconds),
        spread(result.our_seconds),
        f"{result.ratio:.1f}",
    )


def budget_rows(load_set: LoadSet, num_ranks: int, num_redundant: int) -> Iterator[str]:
    load_LE = load_set.loads[0]
    num_layers, num_experts = load_LE.shape
    current = Placement.make(num_layers, num_experts, num_ranks, "linear", num_redundant)
    sizes = slots_of_ranks(num_experts + num_redundant, num_ranks)
    for percent in BUDGETS:
        allowed = num_layers * current.num_slots * percent // 100
        start = time.perf_counter()
        placement = balance(load_LE, sizes, current=current, goal=BalanceGoal(max_moves=allowed))
        seconds = time.perf_counter() - start
        loads_LR = rank_loads(load_LE, placement)
        total = load_LE.sum() / num_ranks / loads_LR.max(axis=1).sum()
        yield line(
            load_set.name, num_ranks, num_redundant, f"{percent} %", allowed,
            count_moves(current, placement), even(balancedness(loads_LR)), f"{total:.4f}",
            f"{1e3 * seconds:.0f}",
        )  # fmt: skip


def count_moves(before: Placement, after: Placement) -> int:
    return sum(
        len(set(new) - set(old))
        for pair in zip(before.layers, after.layers, strict=True)
        for old, new in zip(pair[0].experts, pair[1].experts, strict=True)
    )


def print_budgets(folder: Path | None) -> None:
    print("\n" + line("loads", "ranks", "redundant", "budget", "slots", "moved", "balancedness",
                      "mean / max, layers added up", "ms"))  # fmt: skip
    print("|" + "---|" * 9)
    sets = [zipf_set(skew, seeds=(0,), **LARGEST) for skew in (0.4, 0.8)]
    for load_set in sets:
        print("\n".join(budget_rows(load_set, 32, 32)), flush=True)
    for load_set in recorded_sets(folder) if folder else []:
        if load_set.loads[0].shape[1] == 64:
            print("\n".join(budget_rows(load_set, 8, 16)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of *_counts.json: recorded loads")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()} · {processor_name()}, {os.cpu_count()} cores, load "
          f"{os.getloadavg()[0]:.1f} · Python {platform.python_version()}, numpy {np.__version__}, "
          f"torch {torch.__version__} · `{shlex.join(['python', *sys.argv])}`\n")  # fmt: skip
    if args.folder and (args.folder / EXAMPLE).exists():
        agrees = matches_worked_example(args.folder / EXAMPLE)
        print(f"published example, slot by slot: {'equal' if agrees else 'NOT EQUAL'}\n")
        if not agrees:
            return 1
    print(line(*COLUMNS))
    print("|" + "---|" * len(COLUMNS), flush=True)
    num_lower, ratios = 0, []
    for case in largest_cases():
        result = compare(case, args.rounds)
        ratios.append(result.ratio)
        num_lower += result.num_lower
        print(row(case, result), flush=True)
    for case in itertools.chain(group_cases(), other_cases(args.folder)):
        result = compare(case, args.rounds)
        num_lower += result.num_lower
        print(row(case, result), flush=True)
    print_budgets(args.folder)
    print(f"\nlayers where ours is less even: {num_lower}; least ratio at the largest size: "
          f"{min(ratios):.1f}, wanted {FASTER}")  # fmt: skip
    return int(num_lower > 0 or min(ratios) < FASTER)


if __name__ == "__main__":
    sys.exit(main())
