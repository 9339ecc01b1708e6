"""What moving experts between two processes of this machine costs (experts/moving/staging.py).

    .venv/bin/python scripts/bench_transfer.py [--mb 2,40] [--total-mb 640] [--rounds 7]

- checksum: of an expert's weights in memory, by one thread.
- copy: from memory to memory, by one thread.
- fetch: from the start of a move until another process's experts are staged, with both checksums
  of each piece; one thread on either side, and ZMQ's.
- apply: staged weights into their slots.

All in GB/s, medians of rounds. Longest wait: of a thread that does nothing but look at the clock
in the process that gives, and in the one that gets, by which other work of it would be held up.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
import zmq
from torch import multiprocessing

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.moving.checksum import checksum
from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.experts.moving.staging import ExpertStaging

LOOPBACK = "127.0.0.1"
HIDDEN = 2048
MB = 1e6
NAMES = ("MB an expert", "experts", "checksum", "copy", "fetch", "apply", "longest wait, ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb", default="2,40")
    parser.add_argument("--total-mb", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, zmq {zmq.zmq_version()}, bfloat16"
    print(f"{datetime.date.today()} · {machine} · {versions} · `{shlex.join(sys.argv)}`\n")
    print(f"| {' | '.join(NAMES)} |")
    print("|---" * len(NAMES) + "|")
    for mb in map(int, args.mb.split(",")):
        _measure(mb, max(1, args.total_mb // mb), args.rounds)


def _measure(mb: int, num_experts: int, rounds: int) -> None:
    here, there = multiprocessing.Pipe()
    giver = multiprocessing.get_context("spawn").Process(
        target=_give, args=(there, mb, num_experts), daemon=True
    )
    giver.start()
    bank = _bank(mb, num_experts)
    staging = ExpertStaging([bank], 0, LOOPBACK)
    staging.connect([staging.address, here.recv()])
    watch = _Watch()
    fetches, applies = [], []
    for _ in range(rounds):
        fetches.append(_seconds(lambda: _fetch(staging, num_experts)))
        applies.append(_seconds(staging.apply))
        # The giver's version of the weights must keep up.
        here.send(True)
    wait = watch.stop()
    here.send(False)
    given_wait = here.recv()
    giver.join()
    staging.close()
    expert, other = bank.gate_up_EGD[0].view(torch.int16).numpy(), np.empty(1)
    other = np.empty_like(expert)
    sums = [_seconds(lambda: checksum(bank.gate_up_EGD[0])) for _ in range(rounds)]
    copies = [_seconds(lambda: np.copyto(other, expert)) for _ in range(rounds)]
    total = num_experts * sum(t[0].nbytes for t in (bank.gate_up_EGD, bank.down_EDF))
    rates = [
        num_bytes / statistics.median(times) / 1e9
        for num_bytes, times in (
            (expert.nbytes, sums),
            (expert.nbytes, copies),
            (total, fetches),
            (total, applies),
        )
    ]
    cells = " | ".join(f"{rate:.2f}" for rate in rates)
    print(f"| {mb} | {num_experts} | {cells} | {given_wait:.1f}, {wait:.1f} |", flush=True)


def _give(pipe: Connection, mb: int, num_experts: int) -> None:
    torch.set_num_threads(1)
    staging = ExpertStaging([_bank(mb, num_experts)], 1, LOOPBACK)
    staging.connect([LOOPBACK, staging.address])
    watch = _Watch()
    pipe.send(staging.address)
    while pipe.recv():
        staging.start([], timeout=1)
        _wait(staging)
        staging.apply()
    pipe.send(watch.stop())
    staging.close()


def _bank(mb: int, num_experts: int) -> ExpertBank:
    inner = int(mb * MB / (3 * HIDDEN * 2))
    bank = ExpertBank(num_experts, HIDDEN, inner, "silu", torch.bfloat16, torch.device("cpu"))
    for weights in (bank.gate_up_EGD, bank.down_EDF):
        weights.view(torch.int16).random_()
    return bank


def _fetch(staging: ExpertStaging, num_experts: int) -> None:
    staging.start([ExpertCopy(0, slot, 1, slot) for slot in range(num_experts)], timeout=60)
    _wait(staging)


def _wait(staging: ExpertStaging) -> None:
    while not (state := staging.state()).is_done:
        assert state.error is None, state.error
        time.sleep(1e-3)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class _Watch:
    """How long a thread that wants to look every millisecond is kept from it at the longest."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> float:
        """In ms."""
        self._is_stopped = True
        self._thread.join()
        return 1e3 * self._longest

    def _look(self) -> None:
        while not self._is_stopped:
            took = _seconds(lambda: time.sleep(1e-3))
            self._longest = max(self._longest, took - 1e-3)


if __name__ == "__main__":
    main()
