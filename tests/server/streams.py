"""Clients that read streamed completions, each in a thread, and remember how they ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx


class Stream(threading.Thread):
    """One greedy completion, read to its end.

    `num_chunks`: pieces of text so far. At the end `ended` is the time of it (monotonic seconds),
    and one of `was_done` (with `error` where an error event came first), `refusal` (the status of
    an answer without a stream) and `breakage` (what the connection raised) tells how it came.
    """

    def __init__(self, url: str, prompt: str, **fields: object) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        self._body = {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True}
        self._body |= fields
        self.prompt = prompt
        self.text = ""
        self.num_chunks = 0
        self.was_done = False
        self.error: dict[str, Any] | None = None
        self.refusal: int | None = None
        self.breakage: Exception | None = None
        self.ended: float | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                if answer.status_code == 200:
                    for line in answer.iter_lines():
                        self._take(line.removeprefix("data: "))
                else:
                    self.refusal = answer.status_code
        except Exception as error:
            self.breakage = error
        self.ended = time.monotonic()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.was_done = True
        elif data:
            event = json.loads(data)
            self.error = event.get("error", self.error)
            for choice in event.get("choices", ()):
                self.text += choice["text"]
                self.num_chunks += 1

    def __repr__(self) -> str:
        return (
            f"<{self.num_chunks} chunks, done {self.was_done}, error {self.error}, "
            f"{self.refusal}, {self.breakage!r}, ended {self.ended is not None}>"
        )


def wait_chunks(streams: Sequence[Stream], number: int, seconds: float) -> None:
    """Until the streams have got that many chunks in all, or have all ended."""
    deadline = time.monotonic() + seconds
    while sum(stream.num_chunks for stream in streams) < number:
        if all(stream.ended is not None for stream in streams):
            return
        assert time.monotonic() < deadline, f"fewer than {number} chunks: {streams}"
        time.sleep(0.002)


def wait_ends(streams: Sequence[Stream], seconds: float) -> float:
    """Until all have ended; the time of the last end."""
    deadline = time.monotonic() + seconds
    for stream in streams:
        stream.join(max(0.0, deadline - time.monotonic()))
    open_ones = [stream for stream in streams if stream.ended is None]
    assert not open_ones, f"{len(open_ones)} of {len(streams)} streams hang: {streams}"
    return max(stream.ended or 0.0 for stream in streams)
