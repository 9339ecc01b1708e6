"""JSON out: msgspec, several times faster than building models for every token."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8. Non-finite floats become null, so the result is always legal JSON."""
    return _encoder.encode(value)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def printable(text: str) -> str:
    """`text` with halves of surrogate pairs, which UTF-8 cannot carry, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
