"""Every failure in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import dataclasses

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.encoding import encode, json_response, printable
from moe_serve.errors import AuthenticationError, EngineError, QueueFullError, RequestError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """What a client is told about a failure."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        return {
            "error": {
                "message": printable(self.message),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def report_on(error: Exception) -> ErrorReport:
    """Describe `error` for the client. What we did not raise on purpose stays undescribed."""
    if isinstance(error, RequestError):
        return ErrorReport(
            status=error.status,
            message=error.message,
            type=error.type,
            param=error.param,
            code=error.code,
            headers=_headers_of(error),
        )
    if isinstance(error, EngineError):
        return ErrorReport(
            status=error.status, message=str(error), type=error.type, code=error.code
        )
    if isinstance(error, HTTPException):
        return ErrorReport(
            status=error.status_code,
            message=str(error.detail),
            type="invalid_request_error",
            headers=dict(error.headers or {}),
        )
    return ErrorReport(
        status=500, message="internal error; the server's log has the details", type="server_error"
    )


def _headers_of(error: RequestError) -> dict[str, str]:
    if isinstance(error, QueueFullError):
        return {"Retry-After": str(error.retry_after_seconds)}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def error_response(error: Exception) -> Response:
    report = report_on(error)
    return json_response(report.body, report.status, report.headers)


def error_event(error: Exception) -> bytes:
    """The JSON of an error that happens after a stream began."""
    return encode(report_on(error).body)


async def handle_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for errors raised on purpose."""
    return error_response(error)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    detail = {404: f"no such route: {asked}", 405: f"method not allowed: {asked}"}
    return error_response(
        HTTPException(error.status_code, detail.get(error.status_code, error.detail), error.headers)
    )
