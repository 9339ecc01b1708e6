"""Ranks of one shared memory group, each a process that does what it is told, and may be killed.

with ShmRanks(2, timeout=1.0) as ranks:
    ranks[0].tell("all_gather", 8)       # bytes
    ranks[1].process.kill()
    assert "is gone" in ranks[0].answer()
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.rank_pool import _FORKSERVER

DEADLINE = 30.0


class ShmRank:
    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._connection, theirs = _FORKSERVER.Pipe()
        self.process: Any = _FORKSERVER.Process(
            target=_serve, args=(theirs, rank, size, timeout), daemon=True
        )
        self.process.start()
        theirs.close()

    def tell(self, *command: Any) -> None:
        self._connection.send(command)

    def answer(self) -> Any:
        """What came of it: "" or the error's text."""
        assert self._connection.poll(DEADLINE), "a rank does not answer"
        return self._connection.recv()

    def is_silent(self, seconds: float) -> bool:
        return not self._connection.poll(seconds)


@contextlib.contextmanager
def shm_ranks(size: int, timeout: float = 20.0) -> Iterator[list[ShmRank]]:
    ranks = [ShmRank(rank, size, timeout) for rank in range(size)]
    try:
        address = ranks[0].answer()
        for rank in ranks[1:]:
            rank.tell(address)
            rank.answer()
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def _serve(connection: Connection, rank: int, size: int, timeout: float) -> None:
    import torch

    from moe_serve.parallel.shm.shm_collectives import ShmCollectives

    torch.set_num_threads(1)
    if rank == 0:
        collectives = ShmCollectives.create(size, timeout)
    else:
        (address,) = connection.recv()
        collectives = ShmCollectives.find(address, rank, size, timeout)
    connection.send(collectives.address)
    with contextlib.suppress(EOFError):
        while True:
            name, *args = connection.recv()
            connection.send(_ACTIONS[name](collectives, *args))


def _call(collectives: Any, name: str, num_bytes: int) -> str:
    import torch

    size = collectives.size
    x = torch.ones(num_bytes // 4)
    try:
        if name == "all_gather":
            collectives.all_gather(torch.empty(num_bytes // 4 * size), x)
        elif name == "all_reduce":
            collectives.all_reduce(x)
        else:
            counts = [num_bytes // 4] * size
            whole = torch.ones(num_bytes // 4 * size)
            collectives.all_to_all(torch.empty_like(whole), whole, counts, counts)
    except RuntimeError as error:
        return str(error)
    return ""


def _calls(collectives: Any, name: str, num_bytes: int) -> str:
    """Again and again, until it fails."""
    while not (error := _call(collectives, name, num_bytes)):
        pass
    return error


def _cpu_seconds(collectives: Any) -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _call_in_child(collectives: Any, name: str, num_bytes: int) -> str:
    """Of a fork."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, _call(collectives, name, num_bytes).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.wait()
    return text


_ACTIONS: dict[str, Any] = {
    "call": _call,
    "calls": _calls,
    "close": lambda collectives: collectives.close(),
    "cpu_seconds": _cpu_seconds,
    "call_in_child": _call_in_child,
}
