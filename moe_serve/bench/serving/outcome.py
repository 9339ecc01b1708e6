"""What became of one request, in seconds from the start of its run."""

from __future__ import annotations

import dataclasses
import json

from moe_serve.bench.serving.bodies import Planned
from moe_serve.bench.serving.event_parser import EventParser
from moe_serve.bench.serving.response_parser import ResponseParser
from moe_serve.bench.serving.token_stream import TokenStream, error_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`due` is when it was to be sent, `sent` when it was. Of a failed one, the rest means nothing.

    `ttft`: from `sent` to the first token; `e2el`: to the last; `tpot`: mean time of the tokens
    after the first, None where there is no other. `num_wanted`: tokens that were asked for.
    """

    due: float
    sent: float
    ended: float
    error: str | None = None
    num_input: int = 0
    num_output: int = 0
    num_wanted: int = 0
    num_chunks: int = 0
    ttft: float = 0.0
    e2el: float = 0.0
    tpot: float | None = None
    itl: tuple[float, ...] = ()


class Exchange:
    """A request under way: bytes of its answer in, its outcome out."""

    def __init__(self) -> None:
        self.response = ResponseParser()
        self.stream = TokenStream()
        self.has_begun = False
        self._events = EventParser()
        self._body = b""

    def receive(self, data: bytes, now: float) -> None:
        """Bytes that arrived at `now`. Raises `ValueError` for what is no HTTP."""
        self.has_begun = True
        for piece in self.response.feed(data):
            if self._is_stream:
                for payload in self._events.feed(piece):
                    self.stream.feed(payload, now)
            else:
                self._body += piece

    @property
    def _is_stream(self) -> bool:
        kind = self.response.headers.get("content-type", "")
        return self.response.status == 200 and kind.startswith("text/event-stream")

    def error(self) -> str | None:
        """Why a complete answer is none; None where it is good."""
        status = self.response.status
        if status != 200:
            return f"{status}: {_reason(self._body)}"
        if not self._is_stream:
            return "the answer is no event stream"
        if self.stream.error is not None:
            return self.stream.error
        if not self.stream.stamps:
            return "the answer has no token"
        return None if self.stream.is_finished else "the stream ended without [DONE]"

    def outcome(self, planned: Planned, sent: float, ended: float) -> Outcome:
        """Of a complete answer to `planned`."""
        error = self.error()
        if error is not None:
            return Outcome(due=planned.due, sent=sent, ended=ended, error=error)
        stream = self.stream
        first, last = stream.stamps[0], stream.stamps[-1]
        others = stream.num_output - 1
        return Outcome(
            due=planned.due,
            sent=sent,
            ended=ended,
            num_input=planned.num_input if stream.num_input is None else stream.num_input,
            num_output=stream.num_output,
            num_wanted=planned.num_wanted,
            num_chunks=len(stream.stamps),
            ttft=first - sent,
            e2el=last - sent,
            tpot=(last - first) / others if others > 0 else None,
            itl=tuple(stream.inter_token_latencies()),
        )


def _reason(body: bytes) -> str:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return error_text(body[:1000].decode(errors="replace")) or "no text"
    return error_text(values.get("error", values) if isinstance(values, dict) else values)
