"""Long-lived rank processes for tests, joined by gloo.

    from tests.rank_pool import RankPool

    def scaled_sum(group: RankGroup, factor: int) -> Tensor:      # runs on each rank
        return group.all_gather(torch.full((1,), group.rank)).sum() * factor

    @pytest.fixture(scope="module")
    def pool() -> Iterator[RankPool]:
        with RankPool(4) as pool:
            yield pool

    def test_sum(pool: RankPool) -> None:
        assert pool.run(scaled_sum, 10, size=3) == [30, 30, 30]

A function is found by its file and name, so it may stand in the test file itself; arguments and
results are pickled. Whatever goes wrong, no process outlives its pool, and the next `run` starts a
fresh one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

# A process finds this module by its name; pytest alone need not have its folder on the path.
_ROOT = str(Path(__file__).parents[1])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)
# The processes are forked from one that has imported torch already.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["torch.distributed"])
# After the first error, how long the other ranks get to tell theirs.
_GRACE_SECONDS = 0.5


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time. The message has its traceback."""


class RankPool:
    """`size` ranks. A run may take the first few only; the others wait."""

    def __init__(self, size: int, *, deadline: float = 60.0) -> None:
        self.size = size
        self.deadline = deadline
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int | None = None,
        deadline: float | None = None,
    ) -> list[Any]:
        """`function(group, *args)` on the ranks of a group of `size` -> their results, by rank.

        `deadline`: seconds for all of them, start of the processes included. Raises RankError.
        """
        end = time.monotonic() + (self.deadline if deadline is None else deadline)
        if not self._processes:
            self._start()
        size = self.size if size is None else size
        assert 1 <= size <= self.size
        call = (inspect.getsourcefile(function), function.__module__, function.__qualname__)
        message = pickle.dumps((call, pickle.dumps(args), size))
        try:
            for connection in self._connections[:size]:
                connection.send_bytes(message)
            return self._results(size, end)
        except BaseException:
            self.close(grace=0.0)
            raise

    def close(self, grace: float = 2.0) -> None:
        """Idle processes end by themselves; what is left after `grace` seconds is killed."""
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = _FORKSERVER.Pipe()
            process = _FORKSERVER.Process(
                target=_serve, args=(theirs, rank, self.size, self._folder.name), daemon=True
            )
            _stack_file(self._folder.name, rank).touch()
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _results(self, size: int, end: float) -> list[Any]:
        results: list[Any] = [None] * size
        errors: list[str] = []
        missing = {self._connections[rank]: rank for rank in range(size)}
        while missing:
            ready = wait(list(missing), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = missing.pop(connection)
                try:
                    error, results[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    error = f"died with exit code {self._exit_code(rank)}"
                if error is not None:
                    errors.append(f"rank {rank}: {error}")
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        if missing and not errors:
            errors = self._stacks(list(missing.values()))
        if errors:
            raise RankError("\n".join(errors))
        return results

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(_GRACE_SECONDS)
        code: int | None = self._processes[rank].exitcode
        return code

    def _stacks(self, ranks: list[int]) -> list[str]:
        """Where ranks that do not answer are."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(_GRACE_SECONDS)
        assert self._folder is not None
        files = {rank: _stack_file(self._folder.name, rank) for rank in ranks}
        return [f"rank {rank} is late:\n{file.read_text()}" for rank, file in files.items()]


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}")


def _serve(connection: Connection, rank: int, size: int, folder: str) -> None:
    """A rank's life: calls in, results out, until the pool hangs up."""
    import torch
    import torch.distributed as dist

    # The pool decides when to end, also on Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _stack_file(folder, rank).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        groups = _groups(rank, size)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                connection.send_bytes(_answer(connection.recv_bytes(), groups))


def _groups(rank: int, size: int) -> dict[int, Any]:
    """By size: the group of the first ranks, where this one is among them."""
    import torch.distributed as dist

    from moe_serve.parallel.group import RankGroup
    from moe_serve.parallel.torch_collectives import TorchCollectives

    made = {}
    for count in range(1, size + 1):
        process_group = dist.new_group(range(count)) if count > 1 else None
        if rank < count:
            collectives = None if process_group is None else TorchCollectives(process_group)
            made[count] = RankGroup(collectives)
    return made


def _answer(message: bytes, groups: dict[int, Any]) -> bytes:
    """(traceback or None, result)."""
    try:
        (path, module_name, name), args, size = pickle.loads(message)
        function: Any = _module(path, module_name)
        for part in name.split("."):
            function = getattr(function, part)
        return pickle.dumps((None, function(groups[size], *pickle.loads(args))))
    except BaseException:
        return pickle.dumps((traceback.format_exc(), None))


def _module(path: str, name: str) -> Any:
    """A test module by its file, under the name that pytest gave it: test folders are no package.

    Pickled objects of its classes find it by that name.
    """
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
