"""Compiles the kernels of all cases on all cores, so that the benchmark finds them in the cache."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable

import torch

from kernel_bench.case import Case
from moe_serve.kernels.jit import recorded, target_of

META = torch.device("meta")


def compile_all(list_cases: Callable[[], list[Case]], jobs: int) -> int:
    """`list_cases`: picklable. Returns how many kernels were compiled or found in the cache."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return sum(pool.starmap(_compile_share, [(list_cases, jobs, n) for n in range(jobs)]))


def _compile_share(list_cases: Callable[[], list[Case]], jobs: int, number: int) -> int:
    cases = list_cases()
    # Other numbers of tokens often share a kernel: one process takes them all.
    names = sorted({case.op + case.shape for case in cases})
    own = set(names[number::jobs])
    return sum(_compile(case) for case in cases if case.op + case.shape in own)


def _compile(case: Case) -> int:
    try:
        with recorded(target_of(torch.empty(0, device="cuda"))) as launches:
            case.make(META, 0).run()
        for kernel, grid, args, options in launches:
            kernel.warmup(*args, grid=grid, **options)
    except Exception:  # what is not compiled here is compiled by the benchmark, which reports it
        traceback.print_exc()
        return 0
    return len(launches)
