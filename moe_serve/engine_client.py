"""The API process's side of the engine: starts its process, talks to it, notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio

from moe_serve import engine_environment, wire
from moe_serve.config import EngineConfig
from moe_serve.engine_addresses import EngineAddresses
from moe_serve.errors import EngineDeadError, EngineError, RequestError, RequestFailedError
from moe_serve.heartbeat import beating, loss_monitor
from moe_serve.messages import (
    AbortRequests,
    AddRequest,
    CallAnswer,
    CommTotal,
    EngineCall,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineStats,
    ExpertStats,
    RequestUpdate,
    Shutdown,
    ToEngine,
)

logger = logging.getLogger(__name__)

# A dying engine's last words may still be on their way when its end is noticed.
LAST_WORDS_SECONDS = 0.5
KILL_AFTER_SECONDS = 5.0


class EngineClient:
    """Lives on one event loop. `status` goes from starting to ready, and to dead from either."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str = "info",
        step_timeout: float = 300.0,
        has_ranks: bool = False,
    ) -> None:
        """`has_ranks`: the engine is rank 0 of several. Then each notices when the other stops."""
        self.status: Literal["starting", "ready", "dead"] = "starting"
        self.info: EngineReady | None = None
        self.stats = EngineStats()
        self.experts: ExpertStats | None = None
        self.communication: list[CommTotal] = []
        self.failure: str | None = None
        self.failed_by_config = False
        self.changed = asyncio.Event()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self._config = config
        self._log_level = log_level
        self._step_timeout = step_timeout
        self._has_ranks = has_ranks
        # When the engine last spoke, or got work after it had none.
        self._heard = 0.0
        self._queues: dict[str, asyncio.Queue[RequestUpdate | EngineError]] = {}
        self._calls: dict[int, asyncio.Future[CallAnswer]] = {}
        self._given_up: EngineError | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Start the process and return at once; `changed` is set when `status` changes."""
        self._folder = tempfile.TemporaryDirectory(prefix="moe-serve-", dir=_short_folder())
        addresses = EngineAddresses.within(Path(self._folder.name), self._heartbeat)
        self._context = zmq.asyncio.Context()
        self._inbox = self._bind(zmq.PULL, addresses.from_engine)
        self._outbox = self._bind(zmq.PUSH, addresses.to_engine)
        # Imported there, not here: the API process stays free of torch.
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run_engine, args=(self._config, addresses, self._log_level), name="engine"
        )
        with _signals_ignored():
            self._process.start()
        jobs = [self._receive(), self._watch_process(), self._watch_steps()]
        if self._has_ranks:
            jobs.append(self._watch_silence(loss_monitor(self._outbox)))
        self._tasks = [asyncio.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    @property
    def _heartbeat(self) -> float | None:
        return self._config.collective_timeout if self._has_ranks else None

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        if self._heartbeat is not None:
            beating(socket, self._heartbeat)
        socket.bind(address)
        return socket

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestUpdate, None]:
        """Updates of one request until it finished. Closed early, it aborts the request.

        Raises `EngineDeadError` when the engine ends first, `EngineError` while it starts.
        """
        self._check_ready()
        queue: asyncio.Queue[RequestUpdate | EngineError] = asyncio.Queue()
        if not self._queues:
            self._heard = time.monotonic()
        self._queues[request.request_id] = queue
        finished = False
        try:
            self._send(request)
            while not finished:
                update = await queue.get()
                if isinstance(update, EngineError):
                    raise update
                finished = update.finish_reason is not None
                yield update
        finally:
            del self._queues[request.request_id]
            if not finished:
                self._send(AbortRequests(request_ids=[request.request_id]))

    async def call(self, message: EngineCall) -> dict[str, Any]:
        """The body of the answer, however long it takes.

        Raises `RequestError` for what cannot be, `RequestFailedError` for what went wrong, and
        what `generate` raises.
        """
        self._check_ready()
        answer = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = answer
        try:
            self._send(message)
            found: CallAnswer = await answer
        finally:
            del self._calls[message.call_id]
        if found.error is not None:
            kind = RequestError if found.is_client_fault else RequestFailedError
            raise kind(found.error)
        assert found.body is not None
        return found.body

    def give_up(self, error: EngineError) -> None:
        """Make every `generate` and `call`, open or yet to come, raise `error`, which aborts its
        request."""
        self._given_up = error
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        for queue in self._queues.values():
            queue.put_nowait(error)

    async def stop(self) -> None:
        """End the process, by force if it does not end by itself; release everything."""
        self._is_stopping = True
        self._send(Shutdown())
        # Only an engine that is ready reads its messages.
        if not await self._joined(KILL_AFTER_SECONDS if self.status == "ready" else 0.0):
            self._process.kill()
            await self._joined(KILL_AFTER_SECONDS)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        # With its monitors, which asyncio's sockets keep to themselves.
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def _check_ready(self) -> None:
        if self._given_up is not None:
            raise self._given_up
        if self.status == "starting":
            raise EngineError("the model is still loading")

    def _send(self, message: ToEngine) -> None:
        if self.status == "ready":
            # The socket queues it at once; the future only reports that.
            self._outbox.send(wire.encode(message))

    async def _receive(self) -> None:
        while True:
            message = wire.decode(await self._inbox.recv())
            self._heard = time.monotonic()
            if isinstance(message, EngineOutputs):
                self.stats = message.stats
                self.experts = message.experts or self.experts
                self.communication = message.communication or self.communication
                if self.on_stats is not None:
                    self.on_stats(message.stats)
                for update in message.updates:
                    queue = self._queues.get(update.request_id)
                    if queue is not None:
                        queue.put_nowait(update)
            elif isinstance(message, CallAnswer):
                answer = self._calls.get(message.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            elif self.status == "dead":
                # The first reason that was heard is the one to tell.
                continue
            elif isinstance(message, EngineReady):
                self.info = message
                self.status = "ready"
                self.changed.set()
            elif isinstance(message, EngineFailed):
                self.failed_by_config = message.is_config
                self._die(message.message)

    async def _watch_steps(self) -> None:
        """Notice an engine that lives and does nothing: with requests open, each step speaks."""
        while True:
            await asyncio.sleep(min(1.0, self._step_timeout / 4))
            silence = time.monotonic() - self._heard
            if self.status == "ready" and self._queues and silence > self._step_timeout:
                self._die(f"one step took longer than --step-timeout {self._step_timeout:g} s")
                self._process.kill()

    async def _watch_silence(self, monitor: zmq.asyncio.Socket) -> None:
        """Notice an engine that is stopped: it no longer answers the heartbeat."""
        await monitor.recv_multipart()
        # Where its process ended, that is told with its exit code.
        await asyncio.sleep(2 * LAST_WORDS_SECONDS)
        if self._process.is_alive() and not self._is_stopping:
            self._die(f"it did not answer within --collective-timeout {self._heartbeat:g} s")
            self._process.kill()

    async def _watch_process(self) -> None:
        """Notice the end of the process through its sentinel: no polling, no delay."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        sentinel = self._process.sentinel
        loop.add_reader(sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(sentinel)
        if self._is_stopping:
            return
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self._process.join()
        self._die(f"its process ended with exit code {self._process.exitcode}")

    def _die(self, why: str) -> None:
        if self.status == "dead":
            return
        self.status, self.failure = "dead", why
        if not self.failed_by_config:
            logger.error("the engine ended: %s", why)
        self.give_up(EngineDeadError(f"the engine ended: {why}"))
        self.changed.set()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A fault of ours in a background task must not look like a silent engine."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("reading from the engine failed", exc_info=task.exception())
            self._die(f"reading from it failed: {task.exception()!r}")

    async def _joined(self, seconds: float) -> bool:
        await asyncio.to_thread(self._process.join, seconds)
        return not self._process.is_alive()


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A child started in here ignores them from its first instruction on.

    The terminal sends Ctrl-C to the whole group, a supervisor may send SIGTERM to all. This process
    alone decides when requests are drained, and the engine ends with it in any case.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _short_folder() -> str | None:
    """Where temporary folders go, unless a socket's path there would exceed the system's 107."""
    return "/tmp" if len(tempfile.gettempdir()) > 70 else None


def _run_engine(config: EngineConfig, addresses: EngineAddresses, log_level: str) -> None:
    engine_environment.prepare(os.environ)
    from moe_serve.engine_process import run

    run(config, addresses, log_level)
