"""Chat messages as sent -> messages that a template can take -> a prompt."""

from __future__ import annotations

import asyncio
from typing import Any

from moe_serve.api.prompts import Prompt, check_fits, check_length_of_text, encode_text
from moe_serve.api.state import ApiState
from moe_serve.errors import RequestError

Message = dict[str, Any]

# They would change what the model is asked, and templates here are not given them.
_UNSUPPORTED = ("audio", "function_call", "tool_calls")


def check_messages(value: object) -> list[Message]:
    """Copies of the messages, checked; an assistant's null content becomes "".

    `name` and fields nobody knows are handed to the template as they are.
    """
    if not isinstance(value, list):
        raise RequestError(
            f"messages is {type(value).__name__}; it must be a list", param="messages"
        )
    if not value:
        raise RequestError("messages is empty; send at least one", param="messages")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(value)]


async def encode_chat(
    state: ApiState, messages: list[Message], *, add_generation_prompt: bool
) -> Prompt:
    """Render and tokenize in threads. What the template refuses is a `RequestError`."""
    text = await render(state, messages, add_generation_prompt=add_generation_prompt)
    check_length_of_text(state, len(text), param="messages")
    token_ids = await encode_text(state.tokenizer, text, add_special_tokens=False)
    check_fits(len(token_ids), state.info.max_model_len, param="messages")
    return Prompt(token_ids=token_ids)


async def render(state: ApiState, messages: list[Message], *, add_generation_prompt: bool) -> str:
    """The prompt's text; it brings all special tokens itself."""
    return await asyncio.to_thread(
        state.tokenizer.chat_template.render, messages, add_generation_prompt=add_generation_prompt
    )


def _check_message(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is {type(message).__name__}, not an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string", param=f"{where}.role")
    for field in _UNSUPPORTED:
        if message.get(field):
            raise RequestError(
                f"{where}.{field} is not supported by this server", param=f"{where}.{field}"
            )
    return {**message, "content": _check_content(f"{where}.content", message.get("content"), role)}


def _check_content(where: str, content: object, role: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        return [_check_part(f"{where}[{index}]", part) for index, part in enumerate(content)]
    raise RequestError(
        f"{where} is {type(content).__name__}; it must be a string or a list of text parts",
        param=where,
    )


def _check_part(where: str, part: object) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind != "text":
        raise RequestError(
            f"{where} of type {kind!r} is not supported; only text parts are", param=where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", param=where)
    return {"type": "text", "text": text}
