"""Requests as they go over the wire."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from moe_serve.bench.serving.prompts import Prompt
from moe_serve.errors import ConfigError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request of a run: when to send it (seconds from the start), and its JSON.

    `num_input`: tokens of the prompt as it was made, 0 where only the server can tell;
    `num_wanted`: most tokens of the answer.
    """

    due: float
    body: bytes
    num_input: int
    num_wanted: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What each request says besides its prompt. `extra` is merged in last."""

    endpoint: Endpoint = "completions"
    ignore_eos: bool = True
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def planned(self, model: str, prompt: Prompt, due: float) -> Planned:
        """Raises `ConfigError` for a prompt that the endpoint cannot take."""
        return Planned(
            due=due,
            body=self.body(model, prompt),
            num_input=prompt.num_tokens,
            num_wanted=prompt.max_tokens,
        )

    def body(self, model: str, prompt: Prompt) -> bytes:
        """Raises `ConfigError` for a prompt that the endpoint cannot take."""
        values: dict[str, Any] = {
            "model": model,
            **self._prompt(prompt),
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            values["ignore_eos"] = True
        return json.dumps(values | dict(self.extra), separators=(",", ":")).encode()

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        content = prompt.content
        is_messages = isinstance(content, list) and isinstance(content[0], dict)
        if self.endpoint == "chat":
            if isinstance(content, str):
                return {"messages": [{"role": "user", "content": content}]}
            if not is_messages:
                raise ConfigError("--endpoint chat takes text or messages, no token ids")
            return {"messages": content}
        if is_messages:
            raise ConfigError("messages in --prompts need --endpoint chat")
        return {"prompt": content}
