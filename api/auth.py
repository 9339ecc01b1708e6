"""The API key, where one is set."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.api.errors import error_response
from moe_serve.errors import AuthenticationError

# Probes and scrapers carry no key.
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/version", "/metrics"})


class ApiKeyMiddleware:
    """401 for requests without `Authorization: Bearer <key>`, except on `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_authorized(scope):
            await self.app(scope, receive, send)
            return
        error = AuthenticationError("missing or wrong API key; send it as 'Authorization: Bearer'")
        await error_response(error)(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers arrive as latin-1; comparing bytes in constant time hides how much matched.
        sent = token.strip().encode("latin-1")
        return scheme.lower() == "bearer" and hmac.compare_digest(sent, self._key)
