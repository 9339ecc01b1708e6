"""The engine's own process: messages in, steps, messages out."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading

import zmq

from moe_serve import wire
from moe_serve.config import EngineConfig
from moe_serve.engine import Engine
from moe_serve.engine_loader import load_engine
from moe_serve.errors import CheckpointError, ConfigError, RequestError
from moe_serve.logs import set_up
from moe_serve.messages import AbortRequests, AddRequest, EngineFailed, Shutdown, ToEngine

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
EXIT_FAULT = 1


def run(config: EngineConfig, address: str, log_level: str) -> None:
    """Entry point of the spawned process, started with signals ignored; ends with `sys.exit`."""
    set_up(log_level, role="engine")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    try:
        code = _serve(socket, config)
    finally:
        # What was sent last is the reason for the end: give it time to leave.
        socket.close(linger=1000)
        context.term()
    sys.exit(code)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_FAULT)


def _serve(socket: zmq.Socket[bytes], config: EngineConfig) -> int:
    try:
        engine = load_engine(config, show_progress=True)
        socket.send(wire.encode(engine.info))
        _loop(socket, engine)
    except (ConfigError, CheckpointError) as error:
        socket.send(wire.encode(EngineFailed(message=str(error), is_config=True)))
        return EXIT_CONFIG
    except Exception as error:
        logger.exception("the engine failed")
        socket.send(wire.encode(EngineFailed(message=f"{type(error).__name__}: {error}")))
        return EXIT_FAULT
    return 0


def _loop(socket: zmq.Socket[bytes], engine: Engine) -> None:
    """Take in all waiting messages, then step; sleep in `poll` when there is nothing to do."""
    while True:
        socket.poll(0 if engine.has_work else None)
        while socket.poll(0):
            message = wire.decode(socket.recv())
            if isinstance(message, Shutdown):
                return
            _apply(socket, engine, message)
        socket.send(wire.encode(engine.step()))


def _apply(socket: zmq.Socket[bytes], engine: Engine, message: ToEngine) -> None:
    if isinstance(message, AddRequest):
        try:
            engine.add(message)
        except RequestError as error:
            socket.send(wire.encode(engine.refusal(message, error)))
    elif isinstance(message, AbortRequests):
        engine.abort(message.request_ids)
