"""Experts: their load, the report on it, what ranks move, placement, rebalancing, recordings.

Routes that change the server want the admin key, where there is one: see `auth`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from moe_serve.api.body import body_docs, read_request
from moe_serve.api.encoding import json_response
from moe_serve.api.schemas.common import RequestModel
from moe_serve.api.schemas.moe import DumpRequest, RebalanceRequest, RecordRequest
from moe_serve.api.ticket import Ticket
from moe_serve.errors import DrainingError, MoeServeError, RequestError
from moe_serve.messages import (
    CommunicationCall,
    EngineCall,
    LoadCall,
    PlacementCall,
    RebalanceCall,
    RecordCall,
)

router = APIRouter()

Model = TypeVar("Model", bound=RequestModel)

PHASES = ("all", "prefill", "decode", "recomputed")
FORMATS = ("json", "html")
_call_ids = itertools.count()


@router.get("/v1/moe/load")
async def load(request: Request) -> Response:
    """Counts since the start, in two windows: the newest steps, and all before them."""
    return json_response(await _load(request))


@router.get("/v1/moe/report")
async def report(request: Request) -> Response:
    """What `moe-serve report` tells. `?phase=decode`: of those tokens alone; `?format=html`: as a
    page for a browser.
    """
    phase, kind = _choice(request, "phase", PHASES), _choice(request, "format", FORMATS)
    values = await _load(request)
    # Off the loop, which streams to others meanwhile: a balancer runs for it.
    text = await asyncio.to_thread(_make_report, values, phase, kind)
    return HTMLResponse(text) if isinstance(text, str) else json_response(text)


@router.get("/v1/moe/communication")
async def communication(request: Request) -> Response:
    """What the ranks moved between each other since the start: calls, bytes and times of each
    collective by the size of its messages, for each rank and group.
    """
    body = await _call(request, lambda call_id: CommunicationCall(call_id=call_id))
    return json_response(body | {"model": Ticket.of(request).state.model_names[0]})


@router.get("/v1/moe/placement")
async def placement(request: Request) -> Response:
    """Which experts lie in which slots. `?verify=true`: also a checksum of each expert's weights,
    or an error where replicas differ.
    """
    verify = _choice(request, "verify", ("false", "true")) == "true"
    body = await _call(request, lambda call_id: PlacementCall(call_id=call_id, verify=verify))
    return json_response(body)


@router.post("/v1/moe/rebalance", openapi_extra=body_docs("/v1/moe/rebalance", RebalanceRequest))
async def rebalance(request: Request) -> Response:
    """Answers when the experts lie anew."""
    body = await _read(request, RebalanceRequest)
    if body.slots is not None and body.max_moves is not None:
        raise RequestError("max_moves has no effect with slots; give one", param="max_moves")
    answer = await _call(
        request,
        lambda call_id: RebalanceCall(call_id=call_id, slots=body.slots, max_moves=body.max_moves),
    )
    return json_response(answer)


@router.post("/v1/moe/record/start", openapi_extra=body_docs("/v1/moe/record/start", RecordRequest))
@router.post("/start_expert_distribution_record", include_in_schema=False)
async def start_record(request: Request) -> Response:
    body = await _read(request, RecordRequest)
    if body.mode == "routes" and "window" in body.model_fields_set:
        raise RequestError("window has no effect with mode routes; drop it", param="window")
    answer = await _call(
        request,
        lambda call_id: RecordCall(
            call_id=call_id, action="start", mode=body.mode, window=body.window
        ),
    )
    return json_response(answer)


@router.post("/v1/moe/record/stop")
@router.post("/stop_expert_distribution_record", include_in_schema=False)
async def stop_record(request: Request) -> Response:
    answer = await _call(request, lambda call_id: RecordCall(call_id=call_id, action="stop"))
    return json_response(answer)


@router.post("/v1/moe/record/dump", openapi_extra=body_docs("/v1/moe/record/dump", DumpRequest))
async def dump_record(request: Request) -> Response:
    """Write what was recorded to a file on the server, and begin anew; tells the path."""
    body = await _read(request, DumpRequest)
    answer = await _call(
        request, lambda call_id: RecordCall(call_id=call_id, action="dump", style=body.style)
    )
    return json_response(answer)


@router.post("/dump_expert_distribution_record", include_in_schema=False)
async def dump_record_as_sglang(request: Request) -> Response:
    answer = await _call(
        request, lambda call_id: RecordCall(call_id=call_id, action="dump", style="pt")
    )
    return json_response(answer)


async def _call(request: Request, make: Callable[[int], EngineCall]) -> dict[str, Any]:
    state = Ticket.of(request).state
    state.check_serving()
    try:
        return await state.engine.call(make(next(_call_ids)))
    except asyncio.CancelledError:
        # Requests have been drained, and uvicorn does not wait for the rest.
        if state.is_draining:
            raise DrainingError("the server shut down before the answer came") from None
        raise


async def _load(request: Request) -> dict[str, Any]:
    body = await _call(request, lambda call_id: LoadCall(call_id=call_id))
    return body | {"model": Ticket.of(request).state.model_names[0]}


async def _read(request: Request, model: type[Model]) -> Model:
    """A body that may be left out."""
    if not (await request.body()).strip():
        return model()
    return await read_request(request, model)


def _choice(request: Request, name: str, allowed: tuple[str, ...]) -> str:
    """A query parameter; the first of `allowed` where it is not given."""
    value = request.query_params.get(name, allowed[0])
    if value not in allowed:
        raise RequestError(f"{name} {value!r} must be one of {', '.join(allowed)}", param=name)
    return value


def _make_report(values: dict[str, Any], phase: str, kind: str) -> str | dict[str, Any]:
    # Here: a server that nobody asks for a report needs no balancer and no page.
    from moe_serve.experts.analysis.report import build_report
    from moe_serve.experts.analysis.selection import of_phase
    from moe_serve.experts.files.load_files import from_json
    from moe_serve.reports.page import render_page

    try:
        recording = from_json(values)
        report = build_report(recording if phase == "all" else of_phase(recording, phase))
    except MoeServeError as error:
        raise RequestError(str(error)) from error
    return render_page(report) if kind == "html" else report
