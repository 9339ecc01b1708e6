"""The engine, as the HTTP side sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Literal, Protocol

from moe_serve.messages import AddRequest, EngineReady, EngineStats, RequestUpdate

EngineStatus = Literal["starting", "ready", "dead"]


class EngineClient(Protocol):
    """A handle on the engine process, used from one event loop.

    - `info`: set once the status is "ready".
    - `stats`: of the newest step; `on_stats` is called with those of every step.
    - `failure`: why the engine is dead.
    """

    on_stats: Callable[[EngineStats], None] | None

    @property
    def status(self) -> EngineStatus: ...

    @property
    def info(self) -> EngineReady | None: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def failure(self) -> str | None: ...

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestUpdate, None]:
        """Updates of one request, up to and with the one that has a finish reason.

        Closing it before that aborts the request and frees its blocks. Raises
        `EngineDeadError` when the engine dies.
        """
        ...
