"""GET /v1/models."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moe_serve.api.encoding import json_response
from moe_serve.api.state import ApiState
from moe_serve.api.ticket import Ticket

router = APIRouter()


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "moe_serve"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """503 until the model is loaded, since a list is taken as a promise to serve it."""
    state = Ticket.of(request).state
    return json_response(ModelList(data=[_card(state, name) for name in state.model_names]))


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    state = Ticket.of(request).state
    return json_response(_card(state, state.check_model(name)))


def _card(state: ApiState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=state.created,
        root=state.model_names[0],
        max_model_len=state.info.max_model_len,
    )
