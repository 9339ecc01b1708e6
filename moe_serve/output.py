"""What the engine says about one sequence, as text for its client.

    RequestUpdate --OutputAssembler--> OutputDelta --SequenceOutput.add--> the whole result

Streaming sends the deltas, everything else adds them up, so both give the same text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.detokenizer import Detokenizer, Vocabulary
from moe_serve.messages import FinishReason, RequestUpdate, TokenLogprobs
from moe_serve.sampling_params import SamplingParams
from moe_serve.stop_matcher import StopMatcher
from moe_serve.token_routes import TokenRoutes

# Shapes: T tokens, L MoE layers, K top-k.


class TopLogprob(NamedTuple):
    """One alternative at a position. `text` shows a part of a character as U+FFFD."""

    token_id: int
    text: str
    raw_bytes: bytes
    logprob: float


class LogprobEntry(NamedTuple):
    """One token with its natural log probability and the likeliest alternatives, best first.

    `is_hidden`: the token adds nothing to the text (a skipped special token, or the stop token
    that ended the sequence). The `raw_bytes` of the entries that are not hidden, joined, are the
    text, up to a stop string that was cut off.
    """

    token_id: int
    text: str
    raw_bytes: bytes
    logprob: float
    rank: int
    top: list[TopLogprob]
    is_hidden: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """News for the client; `finish_reason` set: the last one.

    - `text` may be "" while a character is incomplete or a stop string may be coming. The tokens
      and logprobs behind such text are still delivered at once, one logprob entry per token.
    - `prompt_logprobs` comes once; entry 0 is None.
    - `routes`: as in `RequestUpdate`, up to the last token but one that belongs to the sequence.
    - `stop_reason`: the stop string, or the id of the stop token, that ended it.
    - `needs_abort`: a stop string matched, which the engine cannot know: abort the request there.
    - `error`: for finish_reason "error", what to tell the client; `is_client_fault`: the request
      itself is why.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[LogprobEntry] | None = None
    prompt_logprobs: list[LogprobEntry | None] | None = None
    routes: TokenRoutes | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    needs_abort: bool = False
    error: str | None = None
    is_client_fault: bool = False
    num_cached_tokens: int = 0

    @property
    def shows(self) -> bool:
        """Whether a stream has something to send for it."""
        return bool(self.text or self.logprobs) or self.finish_reason is not None


class OutputAssembler:
    """Text side of one sequence: detokenizes, finds stop strings, names tokens in logprobs.

    - A stop string ends the sequence with the token that completes it. Later tokens, of the same
      update or of later ones, are dropped and not counted.
    - Stop strings completed before `min_tokens` output tokens exist are ignored.
    - The stop token that ended the sequence adds no text, unless `include_stop_str_in_output`
      asks for it (a special one still needs `skip_special_tokens` off).
    - However the sequence ends, text still held back comes with the last delta.
    """

    def __init__(
        self,
        request_id: str,
        vocabulary: Vocabulary,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_output_tokens = 0
        self._num_routes = 0
        self.is_finished = False
        self._vocabulary = vocabulary
        self._params = params
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include_in_output=params.include_stop_str_in_output)

    def feed(self, update: RequestUpdate) -> OutputDelta:
        """The news in this update; nothing once the sequence has finished."""
        if self.is_finished:
            return OutputDelta(request_id=self.request_id)
        silent_index = self._silent_index(update)
        text, num_kept = self._feed_tokens(update.token_ids, silent_index)
        if update.finish_reason is not None:
            text += self._flush()
        matched = self._stops.matched
        self.is_finished = matched is not None or update.finish_reason is not None
        return OutputDelta(
            request_id=self.request_id,
            text=text,
            token_ids=update.token_ids[:num_kept],
            logprobs=self._entries(update.logprobs, num_kept, silent_index),
            prompt_logprobs=self._prompt_entries(update.prompt_logprobs),
            routes=self._own_routes(update.routes),
            finish_reason="stop" if matched is not None else update.finish_reason,
            stop_reason=matched if matched is not None else update.stop_reason,
            needs_abort=matched is not None and update.finish_reason is None,
            error=None if matched is not None else update.error,
            is_client_fault=update.is_client_fault,
            num_cached_tokens=update.num_cached_tokens,
        )

    def _silent_index(self, update: RequestUpdate) -> int | None:
        """Where in this update the stop token stands, if it must not show."""
        if update.finish_reason != "stop" or self._params.include_stop_str_in_output:
            return None
        return len(update.token_ids) - 1

    def _feed_tokens(self, token_ids: list[int], silent_index: int | None) -> tuple[str, int]:
        """Text that may be shown, and how many tokens belong to the sequence."""
        parts = []
        for index, token_id in enumerate(token_ids):
            self.num_output_tokens += 1
            if index != silent_index:
                parts.append(self._match(self._detokenizer.feed((token_id,))))
            if self._stops.matched is not None:
                return "".join(parts), index + 1
        return "".join(parts), len(token_ids)

    def _flush(self) -> str:
        return self._match(self._detokenizer.flush()) + self._stops.flush()

    def _match(self, text: str) -> str:
        may_match = self.num_output_tokens >= self._params.min_tokens
        return self._stops.feed(text, may_match=may_match)

    def _entries(
        self, logprobs: list[TokenLogprobs] | None, num_kept: int, silent_index: int | None
    ) -> list[LogprobEntry] | None:
        if logprobs is None:
            return None
        return [
            self._entry(position, is_silent=index == silent_index)
            for index, position in enumerate(logprobs[:num_kept])
        ]

    def _prompt_entries(
        self, logprobs: list[TokenLogprobs | None] | None
    ) -> list[LogprobEntry | None] | None:
        if logprobs is None:
            return None
        return [None if position is None else self._entry(position) for position in logprobs]

    def _own_routes(self, routes: TokenRoutes | None) -> TokenRoutes | None:
        if routes is None:
            return None
        stop = len(self.prompt_token_ids) + max(0, self.num_output_tokens - 1)
        own = routes.between(0, min(routes.num_tokens, stop - self._num_routes))
        self._num_routes += own.num_tokens
        return own

    def _entry(self, position: TokenLogprobs, *, is_silent: bool = False) -> LogprobEntry:
        token_id = position.token_id
        is_skipped = self._params.skip_special_tokens and token_id in self._vocabulary.special_ids
        top = zip(position.top_token_ids, position.top_logprobs, strict=True)
        return LogprobEntry(
            *self._named(token_id, position.logprob),
            rank=position.rank,
            top=[self._named(top_id, logprob) for top_id, logprob in top],
            is_hidden=is_silent or is_skipped,
        )

    def _named(self, token_id: int, logprob: float) -> TopLogprob:
        raw_bytes = self._vocabulary.token_bytes(token_id)
        return TopLogprob(token_id, raw_bytes.decode(errors="replace"), raw_bytes, logprob)


@dataclasses.dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """All deltas of one sequence, added up. `logprobs` stays None when none were asked for."""

    request_id: str
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[LogprobEntry] | None = None
    prompt_logprobs: list[LogprobEntry | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    _parts: list[str] = dataclasses.field(default_factory=list, repr=False)
    _routes: list[TokenRoutes] = dataclasses.field(default_factory=list, repr=False)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """[T, L, K]: the experts that each token chose in each MoE layer, best first; None if
        nobody asked.

        T counts prompt and output without the last token, which was never computed. (Of a prompt
        with no output: all.)
        """
        # A copy, so that it may be written to: torch warns of arrays that may not.
        return TokenRoutes.join(self._routes).ids_TLK.copy() if self._routes else None

    def add(self, delta: OutputDelta) -> None:
        self._parts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.routes is not None:
            self._routes.append(delta.routes)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.error = delta.error
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
