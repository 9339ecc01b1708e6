"""Probes, and what the server says about itself."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.encoding import json_response
from moe_serve.api.ticket import Ticket

router = APIRouter()

VERSION = importlib.metadata.version("moe-serve")


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ready")
@router.head("/ready", include_in_schema=False)
@router.get("/ping")
@router.head("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 only when a request could complete; else 503 with the state, and why it is dead."""
    state = Ticket.of(request).state
    body: dict[str, str] = {"status": state.health}
    if state.health == "dead":
        body["message"] = state.engine.failure or "unknown cause"
    return json_response(body, 200 if state.health == "ready" else 503)


@router.get("/live")
@router.head("/live", include_in_schema=False)
async def live() -> Response:
    """200 while the process answers at all."""
    return json_response({"status": "alive"})


@router.get("/version")
async def version() -> Response:
    return json_response({"version": VERSION})


@router.get("/load")
async def load(request: Request) -> Response:
    """Sequences in the engine, running and waiting."""
    stats = Ticket.of(request).state.engine.stats
    return json_response({"server_load": stats.num_running + stats.num_waiting})


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Version, options (without the keys), and what was loaded."""
    state = Ticket.of(request).state
    config: dict[str, Any] = dataclasses.asdict(state.config)
    for secret in ("api_key", "admin_api_key"):
        del config[secret]
    info = state.engine.info
    return json_response(
        {
            "version": VERSION,
            "models": state.model_names,
            "status": state.health,
            "config": config,
            "engine": None if info is None else dataclasses.asdict(info),
        }
    )
