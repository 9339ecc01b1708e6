"""API keys, where they are set."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.api.errors import error_response
from moe_serve.errors import AuthenticationError

# Probes and scrapers carry no key.
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/version", "/metrics"})
# They change the server for everybody, or make all wait.
ADMIN_PATHS = frozenset(
    {
        "/v1/moe/rebalance",
        "/v1/moe/record/start",
        "/v1/moe/record/stop",
        "/v1/moe/record/dump",
        "/start_expert_distribution_record",
        "/stop_expert_distribution_record",
        "/dump_expert_distribution_record",
    }
)


VERIFIED_PATH = "/v1/moe/placement"


class ApiKeyMiddleware:
    """401 for requests without `Authorization: Bearer <key>`, except on `OPEN_PATHS`.

    `ADMIN_PATHS` want the admin key, and so does verifying a placement, which reads all weights
    between two steps; the clients' one will do where there is no other. The admin key opens
    everything. Without any key, all is open.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None) -> None:
        self.app = app
        client, admin = (None if key is None else key.encode() for key in (api_key, admin_api_key))
        self._admin_keys = [key for key in (admin or client,) if key is not None]
        self._client_keys = [] if client is None else [client, *self._admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_authorized(scope):
            await self.app(scope, receive, send)
            return
        error = AuthenticationError("missing or wrong API key; send it as 'Authorization: Bearer'")
        await error_response(error)(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        keys = self._admin_keys if _is_for_admins(scope) else self._client_keys
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers arrive as latin-1; comparing bytes in constant time hides how much matched.
        sent = token.strip().encode("latin-1")
        matches = [hmac.compare_digest(sent, key) for key in keys]
        return not keys or (scheme.lower() == "bearer" and any(matches))


def _is_for_admins(scope: Scope) -> bool:
    verifies = scope["path"] == VERIFIED_PATH and "verify" in QueryParams(scope["query_string"])
    return verifies or scope["path"] in ADMIN_PATHS
