"""Times of calls that all ranks make together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

WARMUP = 2


def slowest_milliseconds(calls: Sequence[Callable[[], object]], rounds: int) -> Tensor:
    """[calls, rounds]: the slowest rank's time, in turns so that a slow minute meets all alike.

    All ranks of the default process group call it; all get the same.
    """
    seconds = torch.zeros(len(calls), WARMUP + rounds, dtype=torch.float64)
    for turn, (index, call) in itertools.product(range(WARMUP + rounds), enumerate(calls)):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds[index, turn] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return 1e3 * seconds[:, WARMUP:]
