"""Server-sent events out of pieces of any size."""

from __future__ import annotations


class EventParser:
    """Gives what follows `data:`. Each line is an event: the OpenAI API never splits one.

    Works on bytes, so a letter that is split over two packets is whole again before it is decoded.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
