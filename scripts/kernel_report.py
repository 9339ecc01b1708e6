"""Compile every kernel for GPUs that need not be here, and say what each takes of them.

    scripts/kernel_report.py            the tiles that real models get by default
    scripts/kernel_report.py --all      every tile that can be chosen

Ends with 1 where a kernel does not compile, spills registers, uses local memory, needs more shared
memory than its target has, or multiplies 16-bit matrices on sm_90 without wgmma.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import kernel_cases
from kernel_cases.case import Case
from kernel_cases.compiled import Compiled, compile_case, unique

from moe_serve.kernels.targets import TARGETS

_NOT_CASES = {"case", "compiled"}


class Task(NamedTuple):
    module: str
    mode: str
    index: int
    target: str


class Failure(NamedTuple):
    case: str
    target: str
    error: str


def case_modules() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(kernel_cases.__path__)]
    return [name for name in names if name not in _NOT_CASES]


@functools.cache
def cases(module: str, mode: str) -> list[Case]:
    """`mode`: "default" or "everything"."""
    return list(getattr(importlib.import_module(f"kernel_cases.{module}"), mode)())


def run(task: Task) -> list[Compiled] | Failure:
    case = cases(task.module, task.mode)[task.index]
    try:
        return compile_case(case, task.target)
    except Exception as error:  # a report must go on: the rest is worth knowing
        traceback.print_exc()
        first = str(error).strip().splitlines() or [type(error).__name__]
        return Failure(case.name, task.target, first[0])


def run_all(tasks: list[Task], jobs: int) -> Iterator[list[Compiled] | Failure]:
    if jobs == 1:
        yield from map(run, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(run, tasks, chunksize=4)


def table(rows: list[Compiled]) -> Iterator[str]:
    yield (
        f"{'kernel':32} {'case':44} {'target':7} {'warps':>5} {'stages':>6} {'registers':>9} "
        f"{'shared':>7} {'occupancy':>9}"
    )
    for row in rows:
        faults = "  " + "; ".join(row.faults) if row.faults else ""
        yield (
            f"{row.kernel:32.32} {row.case:44.44} {row.target:7} {row.num_warps:5} "
            f"{row.num_stages:6} {row.registers:9} {row.shared_memory:7} {row.occupancy:9.0%}"
            f"{faults}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every tile that can be chosen")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only these")
    parser.add_argument("--only", action="append", choices=case_modules(), help="only these ops")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--json", type=Path, help="also write the table there")
    return parser.parse_args()


def main() -> int:
    warnings.simplefilter("error")
    args = arguments()
    mode = "everything" if args.all else "default"
    tasks = [
        Task(module, mode, index, target)
        for target in args.target or TARGETS
        for module in args.only or case_modules()
        for index in range(len(cases(module, mode)))
    ]
    results = list(run_all(tasks, args.jobs))
    failures = [result for result in results if isinstance(result, Failure)]
    rows = list(unique(row for result in results if isinstance(result, list) for row in result))
    print("\n".join(table(rows)))
    for failure in failures:
        print(f"does not compile: {failure.case} for {failure.target}: {failure.error}")
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    num_faulty = sum(bool(row.faults) for row in rows)
    print(f"{len(rows)} kernels compiled, {num_faulty} with faults, {len(failures)} failed")
    return 1 if num_faulty or failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
