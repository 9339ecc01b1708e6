"""Asks a running server: what commands share that talk to one."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from moe_serve.errors import ConfigError, EngineError, RecordingError
from moe_serve.options import variable

DEFAULT_URL = "http://localhost:8000"
TIMEOUT_SECONDS = 30.0
# Of an answer; beyond this it is none of ours.
MAX_BYTES = 256 * 2**20


def ask(
    url: str,
    path: str,
    api_key: str | None,
    *,
    body: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """The JSON that the server at `url` answers to GET `path`, or with a `body` to POST.

    Raises `EngineError` where it does not answer, or with an error; `RecordingError` where the
    answer is no JSON.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url} must begin with http:// or https://")
    address = url.rstrip("/") + path
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise EngineError(f"{address} answers {error.code}: {_reason(error)}") from error
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise EngineError(f"{address} does not answer: {reason}") from error
    if len(text) > MAX_BYTES:
        raise RecordingError(f"{address} sends more than {MAX_BYTES} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{address} sends no JSON: {error}") from error


def admin_key(given: str | None) -> str | None:
    """The key for routes that change the server: the flag's, else that of the environment."""
    names = (variable("admin_api_key"), variable("api_key"))
    return given or next((os.environ[name] for name in names if os.environ.get(name)), None)


def _reason(error: urllib.error.HTTPError) -> str:
    """The message of an answer in OpenAI's error shape, else the status."""
    try:
        values: Any = json.loads(error.read(65536))
        return str(values["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError, HTTPException):
        return str(error.reason)
