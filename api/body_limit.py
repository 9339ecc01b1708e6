"""Refuses large bodies before they fill the memory, with and without Content-Length."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.api.errors import error_response
from moe_serve.errors import BodyTooLargeError

# A client that is cut while it sends sees a reset connection instead of our answer, so its
# bytes are read and thrown away for a while.
DISCARD_SECONDS = 10.0
DISCARD_FACTOR = 16


class BodyLimitMiddleware:
    """413 for bodies above `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            if "expect" not in headers:
                await self._discard(receive)
            await error_response(self._error(f"of {length} bytes"))(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                if message.get("more_body", False):
                    await self._discard(receive)
                raise self._error("in chunks")
            return message

        return limited_receive

    def _error(self, what: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body {what} is above the limit of {self.max_bytes} bytes (--max-body-bytes)"
        )

    async def _discard(self, receive: Receive) -> None:
        """Read on without keeping anything, up to a number of bytes and seconds."""
        left = self.max_bytes * DISCARD_FACTOR
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return
