"""One HTTP request's claim on the server, returned when the request ends, however it ends."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.api.errors import error_response
from moe_serve.api.state import ApiState

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_LENGTH = 128


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """`request_id` is the X-Request-Id; `arrival_time` is `time.time()`."""

    state: ApiState
    request_id: str
    arrival_time: float
    num_sequences: int = 0

    @classmethod
    def of(cls, request: Request) -> Ticket:
        ticket = request.state.ticket
        assert isinstance(ticket, cls)
        return ticket

    def admit(self, num_sequences: int) -> None:
        self.state.open_sequences(num_sequences)
        self.num_sequences += num_sequences

    def release(self) -> None:
        self.state.close_sequences(self.num_sequences)
        self.num_sequences = 0


def request_id_of(headers: Headers) -> str:
    """The client's X-Request-Id where it is printable ASCII of sane length, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class TicketMiddleware:
    """Outermost: hands out the ticket, returns it, and turns stray exceptions into a 500."""

    def __init__(self, app: ASGIApp, state: ApiState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        ticket = Ticket(state=self.state, request_id=request_id, arrival_time=time.time())
        scope.setdefault("state", {})["ticket"] = ticket
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.info("request %s: the client left", request_id)
        except Exception as error:
            if has_started:
                raise
            logger.exception("request %s failed", request_id)
            await error_response(error)(scope, receive, send_with_id)
        finally:
            ticket.release()
