"""Two sides of a comparison, each in processes of its own, that work only when they are told to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

_CONTEXT = multiprocessing.get_context("spawn")


class SideError(Exception):
    """What a side answered in place of a result."""


class Side:
    """`make(*arguments)` in one process for each environment, then calls of what it returned.

    Raises SideError, with what the process said, where one fails, dies or takes longer than
    `deadline` seconds. Nothing of it is left then, nor after `close`.
    """

    def __init__(
        self,
        make: Callable[..., Callable[..., Any]],
        arguments: Sequence[Any],
        environments: Sequence[Mapping[str, str]],
        deadline: float,
    ) -> None:
        self._deadline = deadline
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for environment in environments:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(theirs, make, tuple(arguments), dict(environment))
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._receive(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, *arguments: Any, deadline: float | None = None) -> list[Any]:
        """The results, by process."""
        for connection in self._connections:
            connection.send(arguments)
        return self._receive(self._deadline if deadline is None else deadline)

    def close(self, grace: float = 10.0) -> None:
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def _receive(self, deadline: float) -> list[Any]:
        end = time.monotonic() + deadline
        found = []
        for index, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, end - time.monotonic())):
                self._fail(f"no answer in {deadline:g} s")
            try:
                is_error, result = connection.recv()
            except EOFError:
                self._processes[index].join(5)
                self._fail(f"its process ended with exit code {self._processes[index].exitcode}")
            if is_error:
                self._fail(result)
            found.append(result)
        return found

    def _fail(self, text: str) -> None:
        self.close(grace=0.0)
        raise SideError(text)


def _serve(
    connection: Connection,
    make: Callable[..., Callable[..., Any]],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    # What libraries print is not part of the table.
    os.dup2(2, 1)
    try:
        call = make(*arguments)
        connection.send((False, None))
        while True:
            connection.send((False, call(*connection.recv())))
    except EOFError:
        closing = getattr(locals().get("call"), "close", None)
        if closing is not None:
            closing()
    except Exception as error:
        lines = traceback.format_exception_only(error)
        # Nobody may hear it any more.
        with contextlib.suppress(OSError):
            connection.send((True, " ".join(line.strip() for line in lines)))
