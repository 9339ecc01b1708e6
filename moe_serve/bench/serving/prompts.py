"""The prompts of a run: made up, after a trace, or from a file. Seeded, so each server gets the
same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.bench.serving.material import Material
from moe_serve.bench.serving.traces import TraceRow
from moe_serve.errors import ConfigError

# Token ids, text, or messages of a chat.
Content = list[int] | str | list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`num_tokens`: as made, 0 where only the server can tell."""

    content: Content
    max_tokens: int
    num_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of made-up prompts and answers.

    Evenly between length * (1 - range_ratio) and length * (1 + range_ratio), as
    `vllm bench serve --random-range-ratio`; `shared_prefix_len` tokens, the same in all prompts
    of a run, come before.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    shared_prefix_len: int = 0

    def draw(self, num_prompts: int, seed: int) -> list[tuple[int, int]]:
        """(input, output) of each prompt; at least one token each."""
        random = np.random.default_rng([seed, 0x1E])
        pairs = [self._bounds(length) for length in (self.input_len, self.output_len)]
        columns = [random.integers(low, high + 1, num_prompts).tolist() for low, high in pairs]
        return list(zip(*columns, strict=True))

    def _bounds(self, length: int) -> tuple[int, int]:
        low = int(np.floor(length * (1 - self.range_ratio)))
        high = int(np.ceil(length * (1 + self.range_ratio)))
        return max(1, low), max(1, high)


def synthetic(
    material: Material, lengths: Lengths, num_prompts: int, *, seed: int, draw: int, is_text: bool
) -> Iterator[Prompt]:
    """Random prompts: each `draw` has the same lengths and other tokens."""
    random = np.random.default_rng([seed, draw, 0x51])
    prefix = material.draw(random, lengths.shared_prefix_len)
    for input_len, output_len in lengths.draw(num_prompts, seed):
        tokens = [*prefix, *material.draw(random, input_len)]
        yield _made(tokens, output_len, material, is_text)


def from_trace(
    material: Material, rows: Sequence[TraceRow], block_tokens: int, *, seed: int, draw: int,
    is_text: bool,
) -> Iterator[Prompt]:  # fmt: skip
    """A prompt a row: equal blocks where rows have equal hash ids, else nothing in common."""
    random = np.random.default_rng([seed, draw, 0x7A])

    def block(hash_id: int) -> list[int]:
        own = np.random.default_rng([seed, draw, 0xB1, *_seeds_of(hash_id)])
        return material.draw(own, block_tokens)

    for row in rows:
        tokens = [token for hash_id in row.hash_ids for token in block(hash_id)]
        del tokens[row.input_len :]
        tokens += material.draw(random, row.input_len - len(tokens))
        yield _made(tokens, row.output_len, material, is_text)


def _seeds_of(number: int) -> list[int]:
    """Of a whole number of any sign: seeds must not be negative."""
    return [int(number < 0), abs(number)]


def _made(tokens: list[int], output_len: int, material: Material, is_text: bool) -> Prompt:
    content: Content = material.to_text(tokens) if is_text else tokens
    return Prompt(content=content, max_tokens=output_len, num_tokens=len(tokens))


def read_prompts(path: str, output_len: int) -> list[Prompt]:
    """The prompts of a file: JSON lines, or else a plain line of text each.

    A JSON line has "prompt" (text or token ids) or "messages", and optionally "max_tokens", which
    else is `output_len`. Raises `ConfigError` that names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path}: there is no prompt in it")
    if not numbered[0][1].lstrip().startswith("{"):
        return [Prompt(content=line, max_tokens=output_len) for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            prompts.append(_json_prompt(json.loads(line), output_len))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--prompts {path}: line {number}: {error}") from error
    return prompts


def _json_prompt(values: Any, output_len: int) -> Prompt:
    if not isinstance(values, dict):
        raise ValueError("is no JSON object")
    max_tokens = values.get("max_tokens", output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens!r} must be a whole number, 1 or more")
    prompt, messages = values.get("prompt"), values.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError('must have either "prompt" or "messages"')
    if messages is not None:
        if not _is_list(messages, dict):
            raise ValueError('"messages" must be a list of objects')
        return Prompt(content=messages, max_tokens=max_tokens)
    if isinstance(prompt, str) and prompt:
        return Prompt(content=prompt, max_tokens=max_tokens)
    if not isinstance(prompt, list) or not _is_list(prompt, int):
        raise ValueError('"prompt" must be text or a list of token ids')
    return Prompt(content=prompt, max_tokens=max_tokens, num_tokens=len(prompt))


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(each) is kind for each in values)
