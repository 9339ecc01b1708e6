"""The engine, as the HTTP side sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal, Protocol

from moe_serve.messages import (
    AddRequest,
    CommTotal,
    EngineCall,
    EngineReady,
    EngineStats,
    ExpertStats,
    RequestUpdate,
)

EngineStatus = Literal["starting", "ready", "dead"]


class EngineClient(Protocol):
    """A handle on the engine process, used from one event loop.

    - `info`: set once the status is "ready".
    - `stats`: of the newest step; `on_stats` is called with those of every step.
    - `experts`: of the newest collection of counts; None before the first.
    - `communication`: as told last, every few steps; empty where one rank is the whole engine.
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
    def experts(self) -> ExpertStats | None: ...

    @property
    def communication(self) -> list[CommTotal]: ...

    @property
    def failure(self) -> str | None: ...

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestUpdate, None]:
        """Updates of one request, up to and with the one that has a finish reason.

        Closing it before that aborts the request and frees its blocks. Raises
        `EngineDeadError` when the engine dies.
        """
        ...

    async def call(self, message: EngineCall) -> dict[str, Any]:
        """The body of the engine's answer.

        Raises `RequestError` for what cannot be, `EngineError` for what went wrong.
        """
        ...
