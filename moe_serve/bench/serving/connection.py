"""One connection to the server, which carries one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from moe_serve.bench.serving.outcome import Exchange


class Connection(asyncio.Protocol):
    """Stamps bytes the moment the event loop hands them over, before anything is parsed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._answered: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, exchange: Exchange) -> None:
        """Send `request`; returns when `exchange` is complete.

        Raises `OSError` or `ValueError` where the connection ends before, or carries no HTTP.
        """
        assert self._transport is not None and self._exchange is None
        self._exchange = exchange
        self._answered = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._answered
        finally:
            self._exchange = self._answered = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._exchange is None:
            self.close()  # an answer that nobody asked for
            return
        try:
            self._exchange.receive(data, now)
        except ValueError as error:
            self._end(error)
            self.close()
            return
        if self._exchange.response.is_complete:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._exchange is None:
            return
        if exc is not None:
            self._end(exc)
            return
        try:
            self._exchange.response.end()
        except ValueError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)
