"""DeepSpeed's `inference_all_reduce` in shared memory: where it is right, and how long it takes."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_bench.launched import launched
from deepspeed_bench.sides import Side, SideError
from moe_serve.bench.table import Table
from moe_serve.parallel.torch_collectives import TorchCollectives

# Its op is compiled at the first start.
DEADLINE = 240.0
# What a case that never ends gets.
SHORT = 10.0
LATE_SECONDS = 3.0
KIB = (2, 32, 512, 2048)


class Reducer:
    """One rank. `late`: seconds that ranks but the first lose before DeepSpeed starts."""

    def __init__(self, late: float = 0.0) -> None:
        from deepspeed import comm

        torch.set_num_threads(1)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        time.sleep(late if self.rank else 0.0)
        comm.init_distributed("gloo", verbose=False)
        self._reduce = comm.inference_all_reduce
        if late:
            self.late = self.sum_of(torch.full((4,), 10.0 * (self.rank + 1)))

    def __call__(self, what: str, *arguments: Any) -> Any:
        return getattr(self, what)(*arguments)

    def sum_of(self, x: Tensor) -> list[float]:
        self._reduce(x)
        return x.flatten().tolist()

    def ones(self, dtype: str, is_strided: bool) -> list[float]:
        """Of as many ones as the rank's number and 1."""
        x = torch.full((4, 2), self.rank + 1, dtype=getattr(torch, dtype))
        return self.sum_of(x.t() if is_strided else x)

    def late_sum(self) -> list[float]:
        return self.late

    def order(self, count: int) -> float:
        """The share of fp32 sums that are not those in order of rank."""
        parts = [
            torch.randn(count, generator=torch.Generator().manual_seed(rank))
            for rank in range(self.size)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        found = parts[self.rank].clone()
        self._reduce(found)
        return float((found != total).float().mean())

    def subgroup(self) -> list[float]:
        """Of the first two ranks."""
        group = dist.new_group([0, 1])
        x = torch.ones(4)
        if self.rank < 2:
            self._reduce(x, group=group)
        return x.tolist()

    def times(self, kib: int, rounds: int) -> list[list[float]]:
        """Seconds by round: shared memory, gloo's own, and ours over gloo."""
        x = torch.ones(kib * 512, dtype=torch.bfloat16)
        world = dist.group.WORLD
        assert world is not None
        ours = TorchCollectives(world)
        calls = (lambda: self._reduce(x), lambda: dist.all_reduce(x), lambda: ours.all_reduce(x))
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for own, call in zip(found, calls, strict=True):
                x.fill_(1)
                dist.barrier()
                start = time.perf_counter()
                call()
                own.append(time.perf_counter() - start)
        return found


def report(options: argparse.Namespace) -> None:
    print("DeepSpeed's all-reduce in shared memory, `inference_all_reduce`\n")
    table = Table(("case", "what comes of it"), num_text_columns=2)
    with launched(2) as ranks:
        bare = [
            {name: value for name, value in rank.items() if name != "LOCAL_SIZE"} for rank in ranks
        ]
        table.add("LOCAL_SIZE not set: 1 + 2", attempt(bare, "ones", "float32", False))
    with launched(2) as ranks:
        table.add("1 + 2, fp32", attempt(ranks, "ones", "float32", False))
        # The files of that start are there, as after any before with the same MASTER_PORT; what
        # they tell is taken to be news unless the calls of that start were a multiple of 3.
        table.add("10 + 20 next, a rank late", attempt(ranks, "late_sum", late=LATE_SECONDS))
        table.add("1 + 2, fp32, not contiguous", attempt(ranks, "ones", "float32", True))
        table.add("1 + 2, int32", attempt(ranks, "ones", "int32", False))
    with launched(3) as ranks:
        shares = attempt(ranks, "order", 100_001)
        table.add("3 ranks, fp32: share not as in order of rank", shares)
        table.add("1 + 1 of a group of 2 among 3 ranks", attempt(ranks, "subgroup", deadline=SHORT))
    print(table, "\n")
    print(time_table(options.rounds), "\n", flush=True)


def attempt(
    environments: Sequence[dict[str, str]],
    what: str,
    *arguments: Any,
    late: float = 0.0,
    deadline: float = DEADLINE,
) -> str:
    """What the ranks told, or what became of them."""
    try:
        with Side(Reducer, (late,), environments, DEADLINE) as side:
            found = side(what, *arguments, deadline=deadline)
    except SideError as error:
        return str(error)
    told = [f"{one[0]:g}" if isinstance(one, list) else f"{one:.0%}" for one in found]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))


def time_table(rounds: int) -> Table:
    table = Table(("KiB, bf16, 2 ranks", "shared memory us", "gloo us", "ours by gloo us"))
    with launched(2) as ranks, Side(Reducer, (), ranks, DEADLINE) as side:
        for kib in KIB:
            by_rank = side("times", kib, rounds)
            cells = []
            for kind in zip(*by_rank, strict=True):
                slowest = [max(both) for both in zip(*kind, strict=True)]
                cells.append(f"{1e6 * statistics.median(slowest):,.0f}")
            table.add(kib, *cells)
    return table
