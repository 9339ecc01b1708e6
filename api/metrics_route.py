"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.ticket import Ticket

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = Ticket.of(request).state.metrics.render()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
