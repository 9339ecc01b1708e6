"""The routes of experts: load, report, placement, rebalancing and recording."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moe_serve.errors import EngineDeadError, RequestError, RequestFailedError
from moe_serve.experts.analysis.report import build_report
from moe_serve.experts.analysis.selection import of_phase
from moe_serve.experts.files.documents import plain
from moe_serve.experts.files.load_files import from_json, to_json
from moe_serve.experts.files.placement_files import placement_values
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import LoadRecording
from moe_serve.messages import (
    CommunicationCall,
    LoadCall,
    PlacementCall,
    RebalanceCall,
    RecordCall,
)

PLACEMENT = Placement.make(3, 7, 2, num_redundant=3)
START, STOP, DUMP = (f"/v1/moe/record/{action}" for action in ("start", "stop", "dump"))
SGLANG = [f"/{action}_expert_distribution_record" for action in ("start", "stop", "dump")]
GETS = ["/v1/moe/load", "/v1/moe/report", "/v1/moe/placement"]
POSTS = ["/v1/moe/rebalance", START, STOP, DUMP, *SGLANG]


def skewed(num_tokens: int) -> LoadRecording:
    """Two windows, prefill and decode, of top-2 choices; what an engine counts."""
    random = np.random.default_rng(7)
    tokens_WC = np.array([[num_tokens, 0, 0], [3, 17, 0]]) if num_tokens else np.zeros((2, 3), int)
    counts = np.zeros((2, 3, 3, 7), dtype=np.int64)
    for window, phase in np.argwhere(tokens_WC).tolist():
        for layer in range(3):
            total = 2 * tokens_WC[window, phase]
            counts[window, phase, layer] = random.multinomial(total, random.dirichlet([0.3] * 7))
    return LoadRecording(
        model="folder",
        top_k=2,
        counts_WCLE=counts,
        tokens_WC=tokens_WC,
        steps_W=np.array([5, 17]),
        seconds_W=np.array([0.5, 1.5]),
        rows_WLR=np.stack([counts.sum(1)[..., :4].sum(-1), counts.sum(1)[..., 4:].sum(-1)], -1),
        placement=PLACEMENT,
        expert_bytes=1000,
    )


LOAD = skewed(129)


@pytest.fixture
def scripted(server: Any) -> Iterator[Any]:
    """The shared server; its engine's calls are forgotten before, and its script after."""
    engine = server.engine
    engine.calls.clear()
    before, engine.answer_of_call = engine.answer_of_call, lambda message: answer(message)
    yield server
    engine.answer_of_call = before


def answer(message: Any) -> dict[str, Any]:
    if isinstance(message, LoadCall):
        return to_json(LOAD)
    if isinstance(message, PlacementCall):
        found: dict[str, Any] = plain(placement_values(PLACEMENT))
        return found
    if isinstance(message, RebalanceCall):
        return {"outcome": "done", "balancedness": (0.5, 1.0)}
    return {"is_recording": message.action == "start"}


def test_the_load_is_a_document_with_the_served_name(scripted: Any) -> None:
    body = scripted.strict_json(scripted.http.get("/v1/moe/load"))
    assert body == to_json(LOAD) | {"model": "tiny"}
    recording = from_json(body)
    assert recording.is_conserved and (recording.counts_WCLE == LOAD.counts_WCLE).all()
    assert [type(call) for call in scripted.engine.calls] == [LoadCall]


@pytest.mark.parametrize("phase", ["all", "prefill", "decode", "recomputed"])
def test_the_report_is_that_of_the_command_line(scripted: Any, phase: str) -> None:
    body = scripted.strict_json(scripted.http.get("/v1/moe/report", params={"phase": phase}))
    recording = from_json(to_json(LOAD) | {"model": "tiny"})
    expected = build_report(recording if phase == "all" else of_phase(recording, phase))
    assert body == expected
    tokens = {"all": 149, "prefill": 132, "decode": 17, "recomputed": 0}
    assert body["tokens"]["total"] == tokens[phase]
    assert scripted.strict_json(scripted.http.get("/v1/moe/report")) == build_report(recording)


def test_the_report_as_a_page(scripted: Any) -> None:
    response = scripted.http.get("/v1/moe/report?format=html&phase=decode")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!DOCTYPE html>") and "Expert load of tiny" in response.text


def test_a_server_without_traffic_has_a_report_too(scripted: Any) -> None:
    scripted.engine.answer_of_call = lambda message: to_json(skewed(0))
    for query in ("", "?phase=decode"):
        body = scripted.strict_json(scripted.http.get(f"/v1/moe/report{query}"))
        assert body["tokens"]["total"] == 0
    assert scripted.http.get("/v1/moe/report?format=html").status_code == 200


def test_communication_is_told_with_the_served_name(scripted: Any) -> None:
    document = {"num_ranks": 1, "summary": ["There is one rank."], "ranks": []}
    scripted.engine.answer_of_call = lambda message: document
    body = scripted.strict_json(scripted.http.get("/v1/moe/communication"))
    assert body == document | {"model": "tiny"}
    assert [type(call) for call in scripted.engine.calls] == [CommunicationCall]


@pytest.mark.parametrize("query", ["", "?verify=false", "?verify=true"])
def test_the_placement_is_told_and_verified_when_asked(scripted: Any, query: str) -> None:
    body = scripted.strict_json(scripted.http.get(f"/v1/moe/placement{query}"))
    assert body == plain(placement_values(PLACEMENT))
    (call,) = scripted.engine.calls
    assert call == PlacementCall(call_id=call.call_id, verify="true" in query)


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("/v1/moe/report?phase=decoding", "phase",
         "phase 'decoding' must be one of all, prefill, decode, recomputed"),
        ("/v1/moe/report?phase=", "phase", "phase '' must be one of"),
        ("/v1/moe/report?format=pdf", "format", "format 'pdf' must be one of json, html"),
        ("/v1/moe/placement?verify=1", "verify", "verify '1' must be one of false, true"),
    ],
)  # fmt: skip
def test_a_wrong_query_value_is_a_400_that_names_it(
    scripted: Any, path: str, param: str, message: str
) -> None:
    error = scripted.error_of(scripted.http.get(path))
    assert error["param"] == param and message in error["message"]
    assert scripted.engine.calls == []


SLOTS = PLACEMENT.slots_LP.tolist()


@pytest.mark.parametrize(
    ("body", "slots", "max_moves"),
    [
        (b"", None, None),
        (b"  \n", None, None),
        (b"{}", None, None),
        (b'{"slots": null, "model": "tiny"}', None, None),
        (b'{"max_moves": 0}', None, 0),
        (b'{"max_moves": 9223372036854775807}', None, 2**63 - 1),
        (b'{"slots": %s}' % str(SLOTS).encode(), SLOTS, None),
        (b'{"slots": []}', [], None),
    ],
)
def test_a_rebalance_reaches_the_engine(
    scripted: Any, body: bytes, slots: Any, max_moves: Any
) -> None:
    response = scripted.post_raw("/v1/moe/rebalance", body)
    found = scripted.strict_json(response)
    assert found == {"outcome": "done", "balancedness": [0.5, 1.0]}
    (call,) = scripted.engine.calls
    assert call == RebalanceCall(call_id=call.call_id, slots=slots, max_moves=max_moves)


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (START, {}, {"action": "start", "mode": "counts", "window": 100}),
        (START, None, {"action": "start", "mode": "counts", "window": 100}),
        (
            START,
            {"mode": "counts", "window": 1},
            {"action": "start", "mode": "counts", "window": 1},
        ),
        (START, {"window": 2**63 - 1}, {"action": "start", "mode": "counts", "window": 2**63 - 1}),
        (START, {"mode": "routes"}, {"action": "start", "mode": "routes"}),
        (STOP, None, {"action": "stop"}),
        (DUMP, None, {"action": "dump", "style": "npz"}),
        (DUMP, {"style": "json"}, {"action": "dump", "style": "json"}),
        (SGLANG[0], None, {"action": "start", "mode": "counts", "window": 100}),
        (SGLANG[1], None, {"action": "stop"}),
        (SGLANG[2], None, {"action": "dump", "style": "pt"}),
    ],
)
def test_a_recording_reaches_the_engine(
    scripted: Any, path: str, body: Any, wanted: dict[str, Any]
) -> None:
    response = scripted.http.post(path) if body is None else scripted.http.post(path, json=body)
    assert scripted.strict_json(response) == {"is_recording": wanted["action"] == "start"}
    (call,) = scripted.engine.calls
    assert call == RecordCall(call_id=call.call_id, **wanted)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/moe/rebalance", '{"max_moves": -1}', "max_moves", "max_moves -1"),
        ("/v1/moe/rebalance", '{"max_moves": 1.5}', "max_moves", "max_moves 1.5"),
        ("/v1/moe/rebalance", '{"max_moves": true}', "max_moves", "max_moves True"),
        ("/v1/moe/rebalance", '{"max_moves": 9223372036854775808}', "max_moves", "less than"),
        ("/v1/moe/rebalance", '{"slots": [[0, -1]]}', "slots", "slots[0][1] -1"),
        ("/v1/moe/rebalance", '{"slots": [[2147483648]]}', "slots", "slots[0][0] 2147483648"),
        ("/v1/moe/rebalance", '{"slots": [0, 1]}', "slots", "slots[0] 0"),
        ("/v1/moe/rebalance", '{"slots": [["0"]]}', "slots", "slots[0][0] '0'"),
        ("/v1/moe/rebalance", '{"slots": {"0": [0]}}', "slots", "slots dict"),
        ("/v1/moe/rebalance", '{"slots": [[0]], "max_moves": 1}', "max_moves", "no effect with"),
        (START, '{"mode": "all"}', "mode", "mode 'all'"),
        (START, '{"window": 0}', "window", "window 0"),
        (START, '{"window": 9223372036854775808}', "window", "window 9223372036854775808"),
        (START, '{"window": "7"}', "window", "window '7'"),
        (START, '{"mode": "routes", "window": 7}', "window", "no effect with mode routes"),
        (SGLANG[0], '{"window": 0}', "window", "window 0"),
        (DUMP, '{"style": "yaml"}', "style", "style 'yaml'"),
        (DUMP, '{"style": 1}', "style", "style 1"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_a_400_that_names_it(
    scripted: Any, path: str, body: str, param: str, message: str
) -> None:
    error = scripted.error_of(scripted.post_raw(path, body.encode()))
    assert error["param"] == param and message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert scripted.engine.calls == []


@pytest.mark.parametrize("raw", [b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"5"])
@pytest.mark.parametrize("path", ["/v1/moe/rebalance", START, DUMP])
def test_what_is_no_json_object_is_a_400(scripted: Any, path: str, raw: bytes) -> None:
    scripted.error_of(scripted.post_raw(path, raw))
    assert scripted.engine.calls == []


def test_other_methods_are_refused(scripted: Any) -> None:
    """Above all a GET, which a browser sends unasked, changes nothing."""
    for path in POSTS:
        scripted.error_of(scripted.http.get(path), 405)
    for path in GETS:
        scripted.error_of(scripted.http.post(path), 405)
    assert scripted.engine.calls == []


def ask_all(server: Any, headers: Any = None) -> dict[str, Any]:
    """Path -> the response, of every route."""
    found = {path: server.http.get(path, headers=headers) for path in GETS}
    return found | {path: server.http.post(path, headers=headers) for path in POSTS}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("experts are being moved already"), 400, "invalid_request_error"),
        (RequestFailedError("experts were not moved: rank 1 sent a wrong checksum"), 500,
         "server_error"),
        (EngineDeadError("the engine ended: killed"), 503, "service_unavailable_error"),
    ],
)  # fmt: skip
def test_what_the_engine_answers_reaches_the_client(
    scripted: Any, error: Exception, status: int, kind: str
) -> None:
    def fail(message: Any) -> dict[str, Any]:
        raise error

    scripted.engine.answer_of_call = fail
    for response in ask_all(scripted).values():
        told = scripted.error_of(response, status)
        assert told["type"] == kind and told["message"] == str(error)


def test_an_unexpected_fault_is_a_500_without_its_details(scripted: Any) -> None:
    scripted.engine.answer_of_call = lambda message: {"secret": object()}
    for path in ("/v1/moe/placement", "/v1/moe/load"):
        error = scripted.error_of(scripted.http.get(path), 500)
        assert "secret" not in error["message"]


def starting(server: Any) -> None:
    server.engine.info, server.engine.status = None, "starting"


def dead(server: Any) -> None:
    server.engine.status, server.engine.failure = "dead", "exit code -9"


def draining(server: Any) -> None:
    server.state.start_draining()


@pytest.mark.parametrize(
    ("begin", "code"),
    [(starting, "engine_unavailable"), (dead, "engine_dead"), (draining, "shutting_down")],
)
def test_a_server_that_does_not_serve_answers_503(
    serve: Any, begin: Callable[[Any], None], code: str
) -> None:
    server = serve()
    begin(server)
    for response in ask_all(server).values():
        assert server.error_of(response, 503)["code"] == code
    assert server.engine.calls == []


def wait_in_calls(engine: Any, release: threading.Event) -> None:
    async def call(message: Any) -> dict[str, Any]:
        engine.calls.append(message)
        while not release.is_set():
            await asyncio.sleep(0.005)
        return answer(message)

    engine.call = call


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(serve: Any) -> None:
    server = serve()
    engine, release = server.engine, threading.Event()
    wait_in_calls(engine, release)
    with pytest.raises(TimeoutError):
        server.send_bytes(
            b"POST /v1/moe/rebalance HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
            num_seconds=0.1,
        )
    assert len(engine.calls) == 1
    server.check_serves()
    release.set()
    server.check_serves()
    assert server.http.get("/v1/moe/load").status_code == 200


def test_who_still_waits_when_the_server_ends_is_told(serve: Any) -> None:
    server = serve()
    wait_in_calls(server.engine, threading.Event())
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(server.http.post("/v1/moe/rebalance", timeout=20))
    )
    thread.start()
    server.wait_until(lambda: len(server.engine.calls) == 1)
    server.state.start_draining()
    server._uvicorn.should_exit = True
    thread.join(10)
    (response,) = found
    assert server.error_of(response, 503)["code"] == "shutting_down"


def test_requests_go_on_beside_a_call_that_waits(serve: Any) -> None:
    server = serve()
    engine, release = server.engine, threading.Event()
    wait_in_calls(engine, release)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda path=path: found.append(server.http.post(path)))
        for path in ("/v1/moe/rebalance", "/v1/moe/rebalance", STOP)
    ]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: len(engine.calls) == 3)
    try:
        server.check_serves()
    finally:
        release.set()
    for thread in threads:
        thread.join(5)
    assert [response.status_code for response in found] == [200, 200, 200]
    assert len({call.call_id for call in engine.calls}) == 3


def statuses(server: Any, key: str | None) -> tuple[set[int], set[int]]:
    """Of the routes that tell, and of those that change the server."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    found = {path: response.status_code for path, response in ask_all(server, headers).items()}
    return {found[path] for path in GETS}, {found[path] for path in POSTS}


@pytest.mark.parametrize(
    ("options", "of_key"),
    [
        # Key -> (what tells, what changes).
        ({}, {None: (200, 200), "any": (200, 200)}),
        ({"api_key": "client"}, {None: (401, 401), "client": (200, 200), "admin": (401, 401)}),
        ({"admin_api_key": "admin"},
         {None: (200, 401), "client": (200, 401), "admin": (200, 200)}),
        ({"api_key": "client", "admin_api_key": "admin"},
         {None: (401, 401), "client": (200, 401), "admin": (200, 200), "adminx": (401, 401)}),
    ],
)  # fmt: skip
def test_what_changes_the_server_wants_the_admin_key(
    serve: Any, options: dict[str, str], of_key: dict[str | None, tuple[int, int]]
) -> None:
    server = serve(**options)
    server.engine.answer_of_call = answer
    for key, (telling, changing) in of_key.items():
        assert statuses(server, key) == ({telling}, {changing}), key
    authorization = {"Authorization": "Bearer admin"}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        response = server.http.post(path, json=body, headers=authorization)
        # The admin key opens what the clients' one opens.
        assert response.status_code == of_key.get("admin", (200, 200))[0]
    for path in ("/health", "/metrics"):
        assert server.http.get(path).status_code == 200


@pytest.mark.parametrize(
    "path", ["//v1/moe/rebalance", "/v1/moe/rebalance/", "/v1/moe/./rebalance"]
)
def test_no_other_spelling_of_a_path_goes_past_the_admin_key(serve: Any, path: str) -> None:
    server = serve(admin_api_key="admin")
    head = "Host: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    raw = server.send_bytes(f"POST {path} HTTP/1.1\r\n{head}".encode())
    assert raw.split(b" ")[1] in (b"404", b"401")
    encoded = server.send_bytes(f"POST /v1/moe/%72ebalance HTTP/1.1\r\n{head}".encode())
    assert encoded.split(b" ")[1] == b"401"
    assert server.engine.calls == []


@pytest.mark.parametrize("query", ["verify=true", "%76erify=true", "verify=false&verify=true"])
def test_to_verify_weights_between_steps_wants_the_admin_key(serve: Any, query: str) -> None:
    server = serve(api_key="client", admin_api_key="admin")
    server.engine.answer_of_call = answer
    codes = [
        server.http.get(
            f"/v1/moe/placement?{query}", headers={"Authorization": f"Bearer {key}"}
        ).status_code
        for key in ("client", "admin")
    ]
    assert codes == [401, 200] and server.engine.calls[0].verify


def test_the_keys_are_not_told(serve: Any) -> None:
    server = serve(admin_api_key="sesame")
    assert "sesame" not in server.http.get("/server_info").text


def test_the_routes_are_on_the_openapi_page_but_for_those_of_sglang(server: Any) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {*GETS, *POSTS} - set(paths) == set(SGLANG)
    for path in ("/v1/moe/rebalance", START, DUMP):
        assert "requestBody" in paths[path]["post"]
