"""The engine's own process: messages in, steps, messages out. With several ranks it is rank 0."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import zmq

from moe_serve import wire
from moe_serve.config import EngineConfig
from moe_serve.engine import Engine
from moe_serve.engine_addresses import EngineAddresses
from moe_serve.engine_loader import load_engine
from moe_serve.errors import CheckpointError, ConfigError, MoeServeError, RequestError
from moe_serve.heartbeat import LossWatch, beating
from moe_serve.lifeline import end_with_parent
from moe_serve.logs import set_up
from moe_serve.messages import (
    AbortRequests,
    AddRequest,
    CallAnswer,
    CommunicationCall,
    EngineFailed,
    Shutdown,
    ToEngine,
)
from moe_serve.parallel.degrees import RankSeat, read_seat
from moe_serve.rank_links import CAUSE_SECONDS, LINGER_MS

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
EXIT_FAULT = 1


def run(config: EngineConfig, addresses: EngineAddresses, log_level: str) -> None:
    """Entry point of the spawned process, started with signals ignored; ends with `sys.exit`."""
    set_up(log_level, role="engine")
    end_with_parent()
    sys.exit(_Process(config, addresses).run())


class _Process:
    def __init__(self, config: EngineConfig, addresses: EngineAddresses) -> None:
        self._config = config
        self._addresses = addresses
        self._context = zmq.Context()
        self._outbox = self._connect(self._context, zmq.PUSH, addresses.from_engine)
        self._inbox = self._connect(self._context, zmq.PULL, addresses.to_engine)
        self._watch: LossWatch | None = None
        if addresses.heartbeat is not None:
            self._watch = LossWatch(self._inbox, _end_with_server)

    def run(self) -> int:
        seat: RankSeat | None = None
        try:
            seat = read_seat(os.environ)
            engine = load_engine(
                self._config, seat, on_failure=self._end_with_rank, show_progress=True
            )
            self._send(engine.info)
            self._loop(engine)
            engine.close()
        except (ConfigError, CheckpointError) as error:
            return self._fail(EngineFailed(message=str(error), is_config=True))
        except Exception as error:
            if seat is not None:
                time.sleep(CAUSE_SECONDS)
            logger.exception("the engine failed")
            return self._fail(EngineFailed(message=f"{type(error).__name__}: {error}"))
        self._close()
        return 0

    def _loop(self, engine: Engine) -> None:
        """Take in all waiting messages, then step; sleep in `poll` when there is nothing to do."""
        while True:
            self._inbox.poll(engine.idle_ms)
            while self._inbox.poll(0):
                message = wire.decode(self._inbox.recv())
                if isinstance(message, Shutdown):
                    return
                self._apply(engine, message)
            self._send(engine.step())
            for answer in engine.experts.take_answers():
                self._send(answer)

    def _apply(self, engine: Engine, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            try:
                engine.add(message)
            except RequestError as error:
                self._send(engine.refusal(message, error))
        elif isinstance(message, AbortRequests):
            engine.abort(message.request_ids)
        elif isinstance(message, CommunicationCall):
            self._send(CallAnswer(call_id=message.call_id, body=engine.communication()))
        elif not isinstance(message, Shutdown):
            engine.experts.call(message)

    def _connect(self, context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = context.socket(kind)
        if self._addresses.heartbeat is not None:
            beating(socket, self._addresses.heartbeat)
        socket.connect(address)
        return socket

    def _send(self, message: Any) -> None:
        self._outbox.send(wire.encode(message))

    def _fail(self, message: EngineFailed) -> int:
        self._send(message)
        self._close()
        return EXIT_CONFIG if message.is_config else EXIT_FAULT

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._context.destroy(linger=LINGER_MS)

    def _end_with_rank(self, error: MoeServeError) -> None:
        """In the thread that watches the ranks; the loop may be stuck in a collective."""
        message = EngineFailed(message=str(error), is_config=isinstance(error, ConfigError))
        # A socket of its own: those of the loop are the loop's.
        context = zmq.Context()
        self._connect(context, zmq.PUSH, self._addresses.from_engine).send(wire.encode(message))
        context.destroy(linger=LINGER_MS)
        os._exit(EXIT_CONFIG if message.is_config else EXIT_FAULT)


def _end_with_server() -> None:
    """The server is stopped, and nobody hears its clients. Its end frees them, and the port."""
    time.sleep(CAUSE_SECONDS)
    server = multiprocessing.parent_process()
    # Once it has ended, our parent is somebody else.
    if server is not None and os.getppid() == server.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGKILL)
    os._exit(EXIT_FAULT)
