"""Server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_serve.api.disconnect import until_disconnect
from moe_serve.api.errors import error_event
from moe_serve.errors import MoeServeError

logger = logging.getLogger(__name__)

DONE = b"[DONE]"
# Line ends to some clients' line splitters, which must not cut an event: NEL, LS, PS.
_LINE_ENDS = {text.encode(): b"\\u%04x" % ord(text) for text in "\x85\u2028\u2029"}


def event(data: bytes) -> bytes:
    """One event. `data` is JSON, so it has no line feed of its own."""
    for raw, escaped in _LINE_ENDS.items():
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends each item of `chunks`, as JSON bytes, as one event, then [DONE].

    What fails before the first chunk is an ordinary HTTP error. What fails later is sent as an
    event {"error": ...}, followed by [DONE], since the status has gone out. When the client
    leaves, `chunks` is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks, None)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if first is not None:
                await _send_event(send, first)
            try:
                async for chunk in chunks:
                    await _send_event(send, chunk)
            except Exception as error:
                if not isinstance(error, MoeServeError):
                    logger.exception("a stream failed")
                await _send_event(send, error_event(error))
        await _send_event(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": event(data), "more_body": True})
