"""Sends requests to one server and tells what became of them."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from moe_serve.bench.serving.bodies import Planned
from moe_serve.bench.serving.connection import Connection
from moe_serve.bench.serving.outcome import Exchange, Outcome
from moe_serve.bench.serving.token_stream import error_text


class Client:
    """Keeps idle connections and opens new ones when there is none. Use as a context manager.

    `clock` gives seconds; times of outcomes are from `start`, which `begin` sets.
    """

    def __init__(
        self, base_url: str, path: str, *, api_key: str | None = None, timeout: float = 3600.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        address = urlsplit(base_url)
        assert address.hostname is not None
        self._host = address.hostname
        self._is_tls = address.scheme == "https"
        self._port = address.port or (443 if self._is_tls else 80)
        self._timeout = timeout
        self._clock = clock
        self._start = 0.0
        self._idle: list[Connection] = []
        lines = [
            f"POST {address.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {address.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        self.head = "\r\n".join(lines).encode()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in self._idle:
            connection.close()

    def begin(self) -> None:
        """A run starts now."""
        self._start = self._clock()

    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start

    async def send(self, planned: Planned) -> Outcome:
        """Send it now and read the answer to its end. Never raises for what the server does."""
        length = f"\r\nContent-Length: {len(planned.body)}\r\n\r\n"
        request = self.head + length.encode() + planned.body
        sent = self.now()
        try:
            async with asyncio.timeout(self._timeout):
                exchange = await self._exchange(request)
        except TimeoutError:
            error = f"no end of the answer within {self._timeout:g} s"
        except (OSError, ValueError) as failure:
            reason = getattr(failure, "strerror", None) or str(failure) or repr(failure)
            error = error_text(reason)
        else:
            return exchange.outcome(planned, sent, self.now())
        return Outcome(due=planned.due, sent=sent, ended=self.now(), error=error)

    async def _exchange(self, request: bytes) -> Exchange:
        while True:
            connection, is_fresh = await self._connection()
            exchange = Exchange()
            try:
                await connection.ask(request, exchange)
            except (OSError, ValueError):
                # Servers close idle connections, and may do so while a request is on its way.
                if is_fresh or exchange.has_begun:
                    raise
                continue
            finally:
                if exchange.response.keeps_alive and connection.is_open:
                    self._idle.append(connection)
                else:
                    connection.close()
            return exchange

    async def _connection(self) -> tuple[Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        context = ssl.create_default_context() if self._is_tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self.now), self._host, self._port, ssl=context
        )
        return connection, True
