"""How long each way to move tensors between the ranks of this machine takes, by message size.

    .venv/bin/python scripts/bench_collectives.py [--ranks 2] [--kib 1,16,...] [--rounds 31]

A size is what one rank holds beforehand: of an all-gather each rank gets that many bytes from every
rank, of all else as many bytes as it gave, or their sum. `copy` is a plain copy, by all ranks at
once, of as many bytes as a rank has afterwards (reduce-scatter: before): no way to move them can be
faster, as it needs that copy, and shared memory needs two. Medians in us of interleaved rounds, in
each of which a call is repeated; each is the slowest rank's time. bfloat16, one thread a rank.
DeepSpeed's is measured where DeepSpeed is installed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from moe_serve.config import CommBackend
from moe_serve.parallel.collectives import Collectives
from moe_serve.parallel.comm_backend import make_collectives

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
BACKENDS: tuple[CommBackend, ...] = ("gloo", "deepspeed", "shm")
WARMUP = 3
# Of a repeated call, in all.
BYTES_OF_A_ROUND = 1 << 20
MOST_CALLS = 20
TIMEOUT = 60.0

Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--kib", default="1,4,16,64,256,1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, one thread a rank"
    print(f"{datetime.date.today()} · {machine} · {versions} · `{shlex.join(sys.argv)}`\n")
    names = ("ranks", "operation", "KiB", *backends(), "copy", "gloo / shm", "copy / shm")
    print(f"| {' | '.join(names)} |")
    print("|---" * len(names) + "|")
    kib = [int(size) for size in args.kib.split(",")]
    for num_ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_rank, (num_ranks, folder, kib, args.rounds), num_ranks)


def backends() -> list[CommBackend]:
    is_here = importlib.util.find_spec("deepspeed") is not None
    return [name for name in BACKENDS if name != "deepspeed" or is_here]


def _rank(rank: int, num_ranks: int, folder: str, kib: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    # Of torch's renamed collectives, and DeepSpeed's own.
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    group = dist.group.WORLD
    assert group is not None
    ways = {name: _make(name, group, num_ranks) for name in backends()}
    for operation in OPERATIONS:
        for size in kib:
            calls: dict[str, Call] = {
                name: _call(way, operation, size * 1024) for name, way in ways.items()
            }
            calls["copy"] = _copy(operation, size * 1024, num_ranks)
            times = _measure(calls, rounds, size * 1024)
            if rank == 0:
                print(_row(num_ranks, operation, size, times), flush=True)
    for way in ways.values():
        way.close()
    dist.destroy_process_group()


def _make(name: CommBackend, group: dist.ProcessGroup, num_ranks: int) -> Collectives:
    made, reason = make_collectives(name, group, ["here"] * num_ranks, TIMEOUT, "cpu")
    if reason is not None:
        sys.exit(f"no shared memory: {reason}")
    return made


def _call(way: Collectives, operation: str, num_bytes: int) -> Call:
    rows = num_bytes // 2 // way.size
    whole = torch.ones(rows * way.size, dtype=torch.bfloat16)
    if operation == "all_reduce":
        # Zeros: a sum that is summed again and again stays what it is.
        whole.zero_()
        return lambda: way.all_reduce(whole)
    if operation == "reduce_scatter":
        part = whole.new_empty(rows)
        return lambda: way.reduce_scatter(part, whole)
    if operation == "all_gather":
        gathered = whole.new_empty(rows * way.size * way.size)
        return lambda: way.all_gather(gathered, whole)
    counts, out = [rows] * way.size, torch.empty_like(whole)
    return lambda: way.all_to_all(out, whole, counts, counts)


def _copy(operation: str, num_bytes: int, num_ranks: int) -> Call:
    if operation == "all_gather":
        num_bytes *= num_ranks
    x = torch.ones(num_bytes, dtype=torch.uint8)
    out = torch.empty_like(x)
    return lambda: out.copy_(x)


def _measure(calls: dict[str, Call], rounds: int, num_bytes: int) -> dict[str, float]:
    """Medians over rounds of the slowest rank's time, in us."""
    num_calls = max(1, min(MOST_CALLS, BYTES_OF_A_ROUND // num_bytes))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARMUP + rounds):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(num_calls):
                call()
            taken[name].append(1e6 * (time.perf_counter() - began) / num_calls)
    taken_by_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(taken_by_ranks, taken)
    return {
        name: statistics.median(
            max(times)
            for times in zip(*(own[name][WARMUP:] for own in taken_by_ranks), strict=True)
        )
        for name in calls
    }


def _row(num_ranks: int, operation: str, kib: int, times: dict[str, float]) -> str:
    cells = [str(num_ranks), operation, f"{kib:,}"]
    cells += [f"{time:,.1f}" for time in times.values()]
    cells += [f"{times['gloo'] / times['shm']:.1f}", f"{times['copy'] / times['shm']:.2f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
