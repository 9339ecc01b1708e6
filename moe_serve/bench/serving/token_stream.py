"""One streamed answer: which chunks brought tokens, and when. Stamps are given, never taken."""

from __future__ import annotations

import dataclasses
from array import array
from itertools import pairwise
from typing import Any

import msgspec

DONE = b"[DONE]"
# Tokens without a chunk of their own (bytes held back, the end token) are up to this share of all;
# beyond it the server sends several tokens a chunk.
_LONE = 0.05


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_token(self) -> bool:
        return bool(
            self.content or self.reasoning_content or self.reasoning or self.tool_calls
        ) or (self.content == "" and not self.role)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def has_token(self) -> bool:
        """A chunk that only opens or closes the stream has none; one of held-back bytes has."""
        if self.delta is None:
            return bool(self.text) or (self.text == "" and self.finish_reason is None)
        if self.finish_reason is None:
            return self.delta.has_token
        return bool(self.delta.content or self.delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    # Some servers send errors without an envelope.
    object: str | None = None
    message: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclasses.dataclass(slots=True)
class TokenStream:
    """What has arrived of an answer. `stamps` and `counts` have an entry a chunk with tokens.

    A count is 0 where the chunk does not tell how many tokens it brought.
    """

    stamps: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    counts: array[int] = dataclasses.field(default_factory=lambda: array("l"))
    num_input: int | None = None
    error: str | None = None
    is_finished: bool = False
    _num_output: int | None = None

    @property
    def num_output(self) -> int:
        """Tokens of the answer: the server's count, else one a chunk."""
        return len(self.stamps) if self._num_output is None else self._num_output

    def feed(self, payload: bytes, now: float) -> None:
        """One event that arrived at `now` (seconds)."""
        if payload == DONE:
            self.is_finished = True
            return
        try:
            chunk = _decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            self.error = f"an event that is no chunk of the API: {error}"
            return
        if chunk.error is not None:
            self.error = error_text(chunk.error)
            return
        if chunk.object == "error":
            self.error = error_text(chunk.message)
            return
        count = 0
        if chunk.usage is not None:
            count = self._count(chunk.usage)
        if chunk.choices:
            self._add(chunk.choices[0], count, now)

    def _count(self, usage: _Usage) -> int:
        """Takes the server's count; returns the tokens since the one before."""
        self.num_input = usage.prompt_tokens or self.num_input
        if usage.completion_tokens is None:
            return 0
        before, self._num_output = self._num_output or 0, usage.completion_tokens
        return max(0, usage.completion_tokens - before)

    def _add(self, choice: _Choice, count: int, now: float) -> None:
        if choice.has_token:
            self.stamps.append(now)
            self.counts.append(len(choice.token_ids or ()) or count)
        if choice.finish_reason is not None:
            self.is_finished = True

    def inter_token_latencies(self) -> list[float]:
        """Seconds between tokens.

        A gap between chunks is divided over the tokens of the later chunk: exactly where each chunk
        tells how many it has, else by the mean of the answer.

            stamps 0, 6, 8, counts 1, 3, 1 -> 2, 2, 2, 2
            stamps 0, 6, 8, counts untold, 6 tokens -> 3, 1
        """
        gaps = [after - before for before, after in pairwise(self.stamps)]
        if not gaps:
            return []
        if all(self.counts):
            counted = zip(gaps, self.counts[1:], strict=True)
            return [gap / count for gap, count in counted for _ in range(count)]
        each = self.num_output / len(self.stamps)
        return [gap / each for gap in gaps] if each > 1 + _LONE else gaps


def error_text(error: object) -> str:
    """The message of an error in OpenAI's shape, on one line of at most 200 letters."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:200]
