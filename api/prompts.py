"""What a client sent as prompt -> token ids that the engine can take."""

from __future__ import annotations

import asyncio
import dataclasses

from moe_serve.api.state import ApiState
from moe_serve.errors import ContextLengthError, RequestError
from moe_serve.sampling_params import check_token_ids
from moe_serve.tokenizer import Tokenizer

RawPrompt = str | list[int]

# Longer texts are tokenized in a thread, so that other requests go on meanwhile.
MAX_INLINE_CHARACTERS = 2048


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """At least one token, and fewer than the context holds. `text`: as sent, if it was text."""

    token_ids: list[int]
    text: str | None = None


def split_prompts(value: object) -> list[RawPrompt]:
    """A string, a list of strings, token ids, or a list of token id lists -> the prompts in it."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(
            f"prompt is {type(value).__name__}; it must be a string, a list of strings, "
            "a list of token ids, or a list of those",
            param="prompt",
        )
    if not value:
        raise _empty("prompt")
    if not isinstance(value[0], str | list):
        return [value]
    for index, prompt in enumerate(value):
        if not isinstance(prompt, str | list):
            raise RequestError(
                f"prompt[{index}] is {type(prompt).__name__}; it must be a string or a list of "
                "token ids, as prompt[0] is",
                param="prompt",
            )
    return value


async def encode_prompts(
    state: ApiState, prompts: list[RawPrompt], *, add_special_tokens: bool
) -> list[Prompt]:
    """Check and tokenize. Raises `RequestError` for a prompt of no tokens or of too many."""
    limit = state.info.max_model_len
    encoded = []
    for raw in prompts:
        if isinstance(raw, str):
            check_length_of_text(state, len(raw), param="prompt")
            token_ids = await encode_text(state.tokenizer, raw, add_special_tokens)
            # A tokenizer may know more tokens than the model.
            check_token_ids("prompt", token_ids, state.info.vocab_size)
        else:
            check_fits(len(raw), limit, param="prompt")
            check_ids("prompt", raw, state.info.vocab_size)
            token_ids = raw
        check_fits(len(token_ids), limit, param="prompt")
        encoded.append(Prompt(token_ids=token_ids, text=raw if isinstance(raw, str) else None))
    return encoded


async def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= MAX_INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def check_ids(name: str, values: list[int], vocab_size: int) -> None:
    """Raise for anything but token ids of the model. JSON's 1.0 and true are no integers."""
    for index, value in enumerate(values):
        if type(value) is not int:
            shown = value if isinstance(value, bool | float) else type(value).__name__
            raise RequestError(f"{name}[{index}] is {shown}, not a token id", param=name)
    check_token_ids(name, values, vocab_size)


def check_length_of_text(state: ApiState, num_characters: int, *, param: str) -> None:
    """Refuse, before the work of tokenizing, a text that cannot fit the context."""
    most = most_characters(state)
    if num_characters > most:
        raise ContextLengthError(
            f"{param} has {num_characters} characters; the context of "
            f"{state.info.max_model_len} tokens holds at most {most}",
            param=param,
        )


def most_characters(state: ApiState) -> int:
    """No text of more can fit the context: a token has no more characters than bytes."""
    return state.info.max_model_len * state.longest_token_bytes


def check_fits(num_tokens: int, max_model_len: int, *, param: str) -> None:
    """One rule everywhere: 1 <= prompt tokens < max_model_len; a prompt is never cut."""
    if num_tokens == 0:
        raise _empty(param)
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"{param} has {num_tokens} tokens; it must have fewer than the context's "
            f"{max_model_len}, to leave room for output",
            param=param,
        )


def _empty(param: str) -> RequestError:
    return RequestError(f"{param} is empty: it has 0 tokens and needs at least 1", param=param)
