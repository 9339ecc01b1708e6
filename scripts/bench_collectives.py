"""The collectives of parallel/group.py against torch's own, on gloo ranks of this machine.

    .venv/bin/python scripts/bench_collectives.py [--ranks 2,4] [--kib 8,128,2048] [--rounds 31]

- gather: an all-gather made of an all-to-all, against torch's own, which `RankGroup` uses.
- sum: reduce-scatter by all-to-all and a sum in order of rank, as `RankGroup.reduce_scatter` does
  it, against torch's own sum, whose order depends on a row's place.

Sizes are what one rank holds before (gather) or after (reduce-scatter). Medians of interleaved
rounds, each the slowest rank's time, in ms.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import multiprocessing

from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.torch_collectives import TorchCollectives

ROW = 1024
WARMUP = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--kib", default="8,128,2048")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, gloo, one thread a rank"
    print(f"{datetime.date.today()} · {machine} · {versions} · `{shlex.join(sys.argv)}`\n")
    names = (
        "ranks",
        "KiB",
        "gather: torch",
        "by all-to-all",
        "ratio",
        "sum: torch",
        "ours",
        "ratio",
    )
    print(f"| {' | '.join(names)} |")
    print("|---" * len(names) + "|")
    kib = [int(size) for size in args.kib.split(",")]
    for num_ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_rank, (num_ranks, folder, kib, args.rounds), num_ranks)


def _rank(rank: int, num_ranks: int, folder: str, kib: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    # Renamed in torch 2.13; the old names serve all versions.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    group = RankGroup(TorchCollectives(dist.group.WORLD))
    for size in kib:
        calls = _calls(group, size * 1024 // (4 * ROW))
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(WARMUP + rounds):
            for taken, call in zip(times, calls, strict=True):
                taken.append(_slowest(call))
        if rank == 0:
            gather, ours, add, our_add = (statistics.median(taken[WARMUP:]) for taken in times)
            print(
                f"| {num_ranks} | {size} | {gather:.2f} | {ours:.2f} | {ours / gather:.2f} "
                f"| {add:.2f} | {our_add:.2f} | {our_add / add:.2f} |",
                flush=True,
            )
    dist.destroy_process_group()


def _calls(group: RankGroup, num_rows: int) -> list[Callable[[], object]]:
    """Torch's gather, one by all-to-all, torch's sum, ours."""
    part = torch.randn(num_rows, ROW)
    whole = torch.randn(num_rows * group.size, ROW)
    return [
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: group.all_to_all(part.repeat(group.size, 1)),
        lambda: dist.reduce_scatter_tensor(part, whole),
        lambda: group.reduce_scatter(whole),
    ]


def _slowest(call: Callable[[], object]) -> float:
    """The slowest rank's time, in ms."""
    dist.barrier()
    began = time.perf_counter()
    call()
    took = torch.tensor([1e3 * (time.perf_counter() - began)])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    main()
