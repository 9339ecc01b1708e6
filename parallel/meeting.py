"""Ranks of one start find each other in a store that may remember an earlier start."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_LOOK_AGAIN_SECONDS = 0.05
_START = "moe_serve/start"


def meet(
    store: Any,
    rank: int,
    num_ranks: int,
    patience: float,
    check_others: Callable[[], None] = lambda: None,
) -> Any:
    """Wait until all ranks are here -> a store of this start alone.

    torchrun keeps its store when it restarts the ranks, with all that dead ones wrote into it. So
    rank 0 names the start, each other rank answers with a word of its own, and goes on only when
    rank 0 has repeated that word. Raises RuntimeError (torch's `DistStoreError`) after `patience`
    seconds. `check_others` is called again and again meanwhile, and raises if one will not come.
    """
    if rank == 0:
        start = _new_word()
        store.set(_START, start)
        ranks = range(1, num_ranks)
        words = [_wait(store, f"{start}/here/{rank}", patience, check_others) for rank in ranks]
        # Nobody before all are here: what comes next is less patient.
        for word in words:
            store.set(f"{start}/go/{word}", "")
    else:
        start = _wait_go(store, rank, patience)
    return dist.PrefixStore(start, store)  # type: ignore[attr-defined]


def _wait_go(store: Any, rank: int, patience: float) -> str:
    deadline = time.monotonic() + patience
    start, word = "", _new_word()
    while True:
        latest = _wait(store, _START, deadline - time.monotonic())
        if latest != start:
            start = latest
            store.set(f"{start}/here/{rank}", word)
        # An old start never answers.
        if store.check([f"{start}/go/{word}"]):
            return start
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank 0 did not answer rank {rank} in {patience:g} s")
        time.sleep(_LOOK_AGAIN_SECONDS)


def _wait(
    store: Any, key: str, seconds: float, check_others: Callable[[], None] = lambda: None
) -> str:
    """Not by the store's own wait, which nothing can end before its time."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        check_others()
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"nobody set {key} in {seconds:g} s")
        time.sleep(_LOOK_AGAIN_SECONDS)
    return str(store.get(key).decode())


def _new_word() -> str:
    return uuid.uuid4().hex
