"""The server process: HTTP here, the engine in a child, and an orderly end for both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from moe_serve import __version__, listen
from moe_serve.banner import banner
from moe_serve.config import BUILTIN_MODEL, ServeConfig
from moe_serve.engine_client import EngineClient
from moe_serve.errors import ConfigError, DrainingError
from moe_serve.logs import set_up
from moe_serve.model_path import resolve_model
from moe_serve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moe_serve.api.state import ApiState

logger = logging.getLogger(__name__)

BUILTIN_NAME = "stories-moe"
EXIT_FAULT = 1
# torchrun's default, in seconds, and what the end takes besides running requests.
LAUNCHER_PATIENCE = 30
LAUNCHER_SPARE = 5
# A launcher passes on the Ctrl-C that the terminal has sent to its ranks too: no second thought.
SAME_SIGNAL_SECONDS = 2.0
# Time for open streams to pass on their error event, at most.
FLUSH_SECONDS = 1.0
# After the engine's death, so long /health says 503: a balancer that polls shall see it.
LINGER_SECONDS = 1.0


def run(config: ServeConfig, *, is_launched: bool = False) -> int:
    """Serve until a signal or the engine's end; the exit code.

    `is_launched`: a launcher started this process as rank 0, perhaps of several.
    0 after SIGINT or SIGTERM, 1 when the engine died. Raises `ConfigError` or `CheckpointError`
    for what the user must mend.
    """
    set_up(config.log_level, role="server")
    sock = listen.bind(config.host, config.port)
    with contextlib.closing(sock):
        folder = resolve_model(config.model, config.revision)
        name = config.served_model_name or model_name(config.model, folder)
        config = dataclasses.replace(config, model=str(folder), revision=None)
        return asyncio.run(_Server(config, sock, name, is_launched).run())


def model_name(model: str, folder: Path) -> str:
    """The name in the API: a hub id as it is, a folder's last part."""
    if model == BUILTIN_MODEL:
        return BUILTIN_NAME
    return folder.resolve().name if Path(model).expanduser().exists() else model


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: requests are drained before uvicorn is told to stop."""
        yield


class _Server:
    def __init__(
        self, config: ServeConfig, sock: socket.socket, name: str, is_launched: bool
    ) -> None:
        self.config = config
        self.is_launched = is_launched
        self.sock = sock
        self.name = name
        self.engine = EngineClient(
            config.engine,
            log_level=config.log_level,
            step_timeout=config.step_timeout,
            has_ranks=is_launched,
        )
        self.signalled = asyncio.Event()
        self.hurried = asyncio.Event()
        self.signal_time = 0.0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        # First, since it takes longest: the HTTP side is put together meanwhile.
        self.engine.start()
        watch = asyncio.create_task(self._watch_launcher()) if self.is_launched else None
        try:
            http = _HttpServer(self._http_config())
            self.serving = asyncio.create_task(http.serve(sockets=[self.sock]))
            self.serving.add_done_callback(lambda _: self.signalled.set())
            try:
                return await self._until_end()
            finally:
                http.should_exit = True
                await self.serving
        finally:
            if watch is not None:
                watch.cancel()
            await self.engine.stop()

    def _http_config(self) -> uvicorn.Config:
        from moe_serve.api.app import create_app

        template = self.config.chat_template
        tokenizer = Tokenizer.from_folder(
            Path(self.config.model), None if template is None else Path(template).expanduser()
        )
        app = create_app(self.config, self.engine, tokenizer, [self.name])
        self.api: ApiState = app.state.api
        return uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
            server_header=False,
        )

    async def _until_end(self) -> int:
        await _first_of(self.engine.changed.wait(), self.signalled.wait())
        if self.engine.status == "ready" and self.engine.info is not None:
            url = listen.url(self.sock)
            print(banner(__version__, self.name, self.engine.info, url), flush=True)
            self.engine.changed.clear()
            await _first_of(self.engine.changed.wait(), self.signalled.wait())
        if self.engine.status == "dead":
            return await self._after_death()
        if self.serving.done():
            logger.error("the HTTP server ended by itself")
            return EXIT_FAULT
        await self._drain()
        return EXIT_FAULT if self.api.health == "dead" else 0

    async def _after_death(self) -> int:
        if self.engine.failed_by_config:
            raise ConfigError(self.engine.failure)
        await asyncio.sleep(LINGER_SECONDS)
        return EXIT_FAULT

    async def _drain(self) -> None:
        """Refuse new requests, let open ones end; past the deadline they end with an error."""
        self.api.start_draining()
        logger.info("draining %d sequences", self.api.num_open_sequences)
        drained = self.api.wait_drained()
        await _first_of(
            drained,
            self.engine.changed.wait(),
            self.hurried.wait(),
            asyncio.sleep(self._shutdown_timeout()),
        )
        if self.api.num_open_sequences:
            logger.warning("%d sequences were cut off", self.api.num_open_sequences)
            self.engine.give_up(DrainingError("the server shut down before the request ended"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.api.wait_drained(), FLUSH_SECONDS)

    def _shutdown_timeout(self) -> float:
        """What the launcher, which kills what does not end in time, leaves for running requests."""
        if not self.is_launched:
            return self.config.shutdown_timeout
        patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", LAUNCHER_PATIENCE))
        return min(self.config.shutdown_timeout, max(0.0, patience - LAUNCHER_SPARE))

    async def _watch_launcher(self) -> None:
        """Shut down when the launcher is gone, as if it had said so once more."""
        launcher = os.getppid()
        while os.getppid() == launcher:
            await asyncio.sleep(1.0)
        logger.error("the launcher is gone; shutting down")
        self._on_signal()

    def _on_signal(self) -> None:
        """The first asks for an orderly end, the second for one at once."""
        if not self.signalled.is_set():
            self.signal_time = time.monotonic()
            self.signalled.set()
        elif not self.is_launched or time.monotonic() - self.signal_time > SAME_SIGNAL_SECONDS:
            self.hurried.set()


async def _first_of(*waits: Coroutine[None, None, object]) -> None:
    """Return when one of these coroutines is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    _, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
