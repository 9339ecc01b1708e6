"""A scripted engine behind the real HTTP side on a real socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Literal

import httpx
import numpy as np
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from moe_serve.api.app import create_app
from moe_serve.api.state import ApiState
from moe_serve.config import ServeConfig
from moe_serve.errors import EngineDeadError
from moe_serve.messages import (
    AddRequest,
    CommTotal,
    EngineCall,
    EngineReady,
    EngineStats,
    ExpertStats,
    RequestUpdate,
    TokenLogprobs,
)
from moe_serve.token_routes import TokenRoutes
from moe_serve.tokenizer import Tokenizer

EOS, BOS = 256, 257
VOCAB_SIZE = 258
MAX_MODEL_LEN = 64
ANSWER = "Once upon a time."
# Refuses a system role and two users in a row, as some models' templates do.
TEMPLATE = """{%- for m in messages -%}
{%- if m['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- if m['role'] not in ('user', 'assistant') -%}
{{ raise_exception('Unknown role ' + m['role']) }}{%- endif -%}
{%- if not loop.first and m['role'] == loop.previtem['role'] -%}
{{ raise_exception('Roles must alternate') }}{%- endif -%}
{{ m['role'][0] }}:{{ m['content'] }};
{%- endfor -%}"""


def make_tokenizer(*, adds_bos: bool = False, template: str | None = TEMPLATE) -> Tokenizer:
    """Token id = byte value; then EOS and BOS."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(256 + rank): byte for rank, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    return Tokenizer(hf, chat_template=template)


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """The token itself is the likeliest, then its neighbours."""
    return TokenLogprobs(
        token_id=token_id,
        logprob=-0.5,
        rank=1,
        top_token_ids=[(token_id + i) % 256 for i in range(num_top)],
        top_logprobs=[-0.5 - i for i in range(num_top)],
    )


class FakeEngine:
    """Says `answer`, a byte a step, then EOS; a seeded request gets text of its seed instead."""

    def __init__(self, answer: str | bytes = ANSWER, *, step_seconds: float = 0.0) -> None:
        self.status: Literal["starting", "ready", "dead"] = "ready"
        self.info: EngineReady | None = ready()
        self.stats = EngineStats()
        self.experts: ExpertStats | None = None
        self.communication: list[CommTotal] = []
        # What `call` was asked, and what it answers: a body, or an error to raise.
        self.calls: list[EngineCall] = []
        self.answer_of_call: Callable[[EngineCall], dict[str, Any]] = lambda message: {}
        self.failure: str | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.answer = answer.encode() if isinstance(answer, str) else answer
        self.step_seconds = step_seconds
        self.requests: list[AddRequest] = []
        self.open_ids: set[str] = set()
        self.aborted_ids: list[str] = []
        self.fail_at: int | None = None
        self.failure_error: Exception = EngineDeadError("the engine ended: killed")
        self.logprob_override: float | None = None
        self.starts_empty = False

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestUpdate, None]:
        assert request.prompt_token_ids, "nothing may reach the engine without tokens"
        assert request.request_id not in self.open_ids
        self.requests.append(request)
        self.open_ids.add(request.request_id)
        is_finished = False
        try:
            for step, update in enumerate(self._updates(request)):
                if self.fail_at == step:
                    raise self.failure_error
                await asyncio.sleep(self.step_seconds)
                self._count_step()
                is_finished = update.finish_reason is not None
                yield update
        finally:
            self.open_ids.remove(request.request_id)
            if not is_finished:
                self.aborted_ids.append(request.request_id)

    async def call(self, message: EngineCall) -> dict[str, Any]:
        self.calls.append(message)
        return self.answer_of_call(message)

    def _count_step(self) -> None:
        self.stats = EngineStats(
            num_running=len(self.open_ids),
            kv_cache_usage=0.25,
            num_scheduled_tokens=1,
            num_preemptions=2,
            prefix_cache_queries=40,
            prefix_cache_hits=30,
        )
        if self.on_stats is not None:
            self.on_stats(self.stats)

    def _updates(self, request: AddRequest) -> Iterator[RequestUpdate]:
        params = request.sampling
        assert params.max_tokens is not None
        prompt_logprobs = self._prompt_logprobs(request)
        if params.max_tokens == 0:
            yield RequestUpdate(
                request_id=request.request_id,
                token_ids=[],
                prompt_logprobs=prompt_logprobs,
                routes=self._routes(request, 0, len(request.prompt_token_ids)),
                finish_reason="length",
            )
            return
        if self.starts_empty:
            yield RequestUpdate(request_id=request.request_id, token_ids=[])
        script = [*self._script(request), *([] if params.ignore_eos else [EOS])]
        for position, token_id in enumerate(script[: params.max_tokens]):
            is_stop = token_id == EOS or token_id in params.stop_token_ids
            is_last = position + 1 == params.max_tokens
            num_computed = len(request.prompt_token_ids) + position
            reason: Any = "stop" if is_stop else "length" if is_last else None
            yield RequestUpdate(
                request_id=request.request_id,
                token_ids=[token_id],
                logprobs=self._logprobs(token_id, params.logprobs),
                prompt_logprobs=prompt_logprobs if position == 0 else None,
                routes=self._routes(request, num_computed - 1 if position else 0, num_computed),
                finish_reason=reason,
                stop_reason=token_id if is_stop and token_id != EOS else None,
                num_cached_tokens=1,
                scheduled_time=request.arrival_time + 0.001,
                first_token_time=request.arrival_time + 0.002,
            )
            if is_stop:
                return

    def _script(self, request: AddRequest) -> bytes:
        params = request.sampling
        if params.seed is not None and not params.is_greedy:
            letters = random.Random(params.seed)
            return bytes(letters.randrange(97, 123) for _ in range(MAX_MODEL_LEN))
        if params.ignore_eos:
            return (self.answer * MAX_MODEL_LEN)[:MAX_MODEL_LEN]
        return self.answer

    def _logprobs(self, token_id: int, num_top: int | None) -> list[TokenLogprobs] | None:
        if num_top is None:
            return None
        entry = logprobs_of(token_id, num_top)
        if self.logprob_override is not None:
            entry = dataclasses.replace(entry, logprob=self.logprob_override)
        return [entry]

    def _routes(self, request: AddRequest, start: int, stop: int) -> TokenRoutes | None:
        """Of positions [start, stop): 3 layers, 2 experts a token, all different."""
        if not request.sampling.return_routed_experts:
            return None
        ids = np.arange(6 * start, 6 * stop, dtype=np.int16)
        return TokenRoutes.of(ids.reshape(-1, 3, 2))

    def _prompt_logprobs(self, request: AddRequest) -> list[TokenLogprobs | None] | None:
        num_top = request.sampling.prompt_logprobs
        if num_top is None:
            return None
        return [None, *(logprobs_of(i, num_top) for i in request.prompt_token_ids[1:])]


def ready() -> EngineReady:
    return EngineReady(
        architecture="qwen3_moe",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_kv_blocks=32,
        kv_cache_bytes=2**20,
        num_parameters=1000,
        num_active_parameters=500,
        dtype="float32",
        device="cpu",
        num_threads=1,
        load_seconds=0.5,
    )


def wait_until(is_true: Callable[[], bool], num_seconds: float = 5.0) -> None:
    deadline = time.monotonic() + num_seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict_json(response: httpx.Response) -> Any:
    return json.loads(response.content.decode(), parse_constant=refuse_constant)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, checked for its shape."""
    body = strict_json(response)
    assert response.status_code == status, body
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert "Traceback" not in response.text
    return error


def events_of(body: bytes) -> list[Any]:
    """The JSON of all events; framing checked byte by byte, [DONE] once and last."""
    assert body.endswith(b"\n\n")
    lines = body[:-2].split(b"\n\n")
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    assert lines[-1] == b"data: [DONE]" and lines.count(b"data: [DONE]") == 1
    return [json.loads(line[6:].decode(), parse_constant=refuse_constant) for line in lines[:-1]]


class Server:
    """uvicorn in a thread, and an HTTP client of it."""

    error_of = staticmethod(error_of)
    events_of = staticmethod(events_of)
    strict_json = staticmethod(strict_json)
    wait_until = staticmethod(wait_until)

    def __init__(self, engine: FakeEngine, config: ServeConfig, tokenizer: Tokenizer) -> None:
        self.engine = engine
        app = create_app(config, engine, tokenizer, ["tiny", "path/to/tiny"])
        self.state: ApiState = app.state.api
        # With the protocol named, asyncio turns Nagle's algorithm off on accepted connections.
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()
        wait_until(lambda: self._uvicorn.started)
        self.http = httpx.Client(base_url=self.url, timeout=10, trust_env=False)

    def stop(self) -> None:
        self.http.close()
        self._uvicorn.should_exit = True

    def join(self) -> None:
        self._thread.join(10)
        self._socket.close()
        assert not self._thread.is_alive()

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=fields)

    def chat(self, content: Any = "x", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def post_raw(self, path: str, body: bytes) -> httpx.Response:
        return self.http.post(path, content=body, headers={"Content-Type": "application/json"})

    def send_bytes(self, data: bytes, *, num_seconds: float = 10.0) -> bytes:
        """What comes back for raw bytes on a new connection, until the server closes it."""
        with socket.create_connection(("127.0.0.1", self.port), num_seconds) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def check_serves(self) -> None:
        """Nothing is left behind: healthy, idle, and the known answer still comes."""
        wait_until(lambda: self.state.num_open_sequences == 0)
        assert self.engine.open_ids == set()
        assert self.http.get("/health").status_code == 200
        answer = self.complete(prompt="fixed", max_tokens=64, temperature=0).json()
        assert answer["choices"][0]["text"] == self.engine.answer.decode(errors="replace")


Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Starts servers: serve("what the engine says", adds_bos=True, max_queue_len=2)."""
    servers: list[Server] = []

    def start(
        answer: str | bytes = ANSWER,
        *,
        step_seconds: float = 0.0,
        adds_bos: bool = False,
        template: str | None = TEMPLATE,
        **options: Any,
    ) -> Server:
        tokenizer = make_tokenizer(adds_bos=adds_bos, template=template)
        engine = FakeEngine(answer, step_seconds=step_seconds)
        servers.append(Server(engine, ServeConfig(**options), tokenizer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
    for server in servers:
        server.join()


@pytest.fixture(scope="module")
def shared_server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """One server for the module; afterwards it must be idle and still give its known answer."""
    yield shared_server
    shared_server.check_serves()
