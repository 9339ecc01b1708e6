"""What all routes share: the engine, the tokenizer, and who is being served."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from typing import Literal

from moe_serve.api.engine import EngineClient
from moe_serve.api.metrics import ApiMetrics
from moe_serve.config import ServeConfig
from moe_serve.errors import (
    DrainingError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
)
from moe_serve.messages import EngineReady
from moe_serve.tokenizer import Tokenizer

Health = Literal["starting", "ready", "draining", "dead"]


@dataclasses.dataclass(kw_only=True, eq=False)
class ApiState:
    """Reached by routes, and by the process, as `app.state.api`.

    A sequence is open from its admission until the last byte of its answer went out.
    """

    config: ServeConfig
    engine: EngineClient
    tokenizer: Tokenizer
    model_names: list[str]
    metrics: ApiMetrics
    is_draining: bool = False
    num_open_sequences: int = 0
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    _is_idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_idle.set()

    @property
    def health(self) -> Health:
        if self.engine.status == "dead":
            return "dead"
        if self.is_draining:
            return "draining"
        return "starting" if self.engine.info is None else self.engine.status

    @property
    def info(self) -> EngineReady:
        """What was loaded; raises `EngineError` where that is not known yet."""
        if self.engine.status == "dead":
            raise EngineDeadError(f"the engine is dead: {self.engine.failure or 'unknown cause'}")
        if self.engine.info is None:
            raise EngineError("the model is still loading; /health tells when it is ready")
        return self.engine.info

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """No text of more bytes than this per token fits a number of tokens."""
        token_bytes = self.tokenizer.token_bytes
        return max(len(token_bytes(token_id)) for token_id in range(self.tokenizer.vocab_size))

    def start_draining(self) -> None:
        """From now on new requests get 503; open ones go on."""
        self.is_draining = True

    async def wait_drained(self) -> None:
        """Return once no sequence is open."""
        await self._is_idle.wait()

    def check_serving(self) -> EngineReady:
        """Raise unless a request could complete now."""
        info = self.info
        if self.is_draining:
            raise DrainingError("the server is shutting down")
        return info

    def check_model(self, name: str | None) -> str:
        """The served name that a request means; without one, the first."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFoundError(name, self.model_names)
        return name

    def open_sequences(self, count: int) -> None:
        """Admit `count` sequences or raise. Balanced by `close_sequences`."""
        self.check_serving()
        limit = self.config.max_queue_len
        if count > limit:
            raise RequestError(
                f"this request asks for {count} sequences; the queue holds {limit}", param="n"
            )
        if self.num_open_sequences + count > limit:
            raise QueueFullError(
                f"{self.num_open_sequences} sequences are open and {count} more would exceed "
                f"the limit of {limit}; try again later"
            )
        self.num_open_sequences += count
        self._is_idle.clear()

    def close_sequences(self, count: int) -> None:
        self.num_open_sequences -= count
        assert self.num_open_sequences >= 0
        if self.num_open_sequences == 0:
            self._is_idle.set()
