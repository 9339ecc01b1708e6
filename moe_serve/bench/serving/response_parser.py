"""An HTTP/1.1 response out of pieces of any size (RFC 9112). No socket, no clock.

Written here because a stamp must be taken when bytes arrive, and because the client's own work per
token is part of what it measures.
"""

from __future__ import annotations

import enum

_MAX_HEAD = 65536


class _Part(enum.Enum):
    HEAD = enum.auto()
    SIZED = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()
    UNTIL_CLOSE = enum.auto()
    COMPLETE = enum.auto()


class ResponseParser:
    """Feed it bytes; it gives those of the body. `status` is 0 until the head is complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._part = _Part.HEAD
        self._buffer = b""
        # Bytes missing from a sized body or chunk.
        self._missing = 0

    @property
    def is_complete(self) -> bool:
        return self._part is _Part.COMPLETE

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may carry another request after this answer."""
        return self.is_complete and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> list[bytes]:
        """Pieces of the body that `data` completes. Raises `ValueError` for what is no HTTP."""
        self._buffer += data
        pieces: list[bytes] = []
        while self._buffer and not self.is_complete:
            if self._part in (_Part.SIZED, _Part.CHUNK, _Part.UNTIL_CLOSE):
                pieces.append(self._take_body())
            else:
                line = self._take_line()
                if line is None:
                    break
                self._read_line(line)
        return pieces

    def end(self) -> None:
        """The server closed the connection. Raises `ValueError` where that cuts the answer off."""
        if self._part is _Part.UNTIL_CLOSE:
            self._part = _Part.COMPLETE
            self.headers["connection"] = "close"
        if not self.is_complete:
            raise ValueError("the connection was closed before the end of the answer")

    def _take_body(self) -> bytes:
        if self._part is _Part.UNTIL_CLOSE:
            piece, self._buffer = self._buffer, b""
            return piece
        piece, self._buffer = self._buffer[: self._missing], self._buffer[self._missing :]
        self._missing -= len(piece)
        if not self._missing:
            self._part = _Part.CHUNK_END if self._part is _Part.CHUNK else _Part.COMPLETE
        return piece

    def _take_line(self) -> bytes | None:
        """A line, or the whole head; None until it is there."""
        mark = b"\r\n\r\n" if self._part is _Part.HEAD else b"\r\n"
        line, found, rest = self._buffer.partition(mark)
        if not found:
            if len(line) > _MAX_HEAD:
                raise ValueError(f"a head or chunk line of more than {_MAX_HEAD} bytes")
            return None
        self._buffer = rest
        return line

    def _read_line(self, line: bytes) -> None:
        if self._part is _Part.HEAD:
            self._read_head(line)
        elif self._part is _Part.CHUNK_SIZE:
            self._missing = _chunk_size(line)
            self._part = _Part.CHUNK if self._missing else _Part.TRAILER
        elif self._part is _Part.CHUNK_END:
            if line:
                raise ValueError("a chunk is longer than its size")
            self._part = _Part.CHUNK_SIZE
        elif not line:
            self._part = _Part.COMPLETE

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise ValueError(f"the answer begins with {first[:60]!r}, which is no HTTP/1.1")
        if words[1].startswith("1"):
            return  # an interim answer; the real head follows
        self.status = int(words[1])
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if words[0] == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        self._part = self._body_part()

    def _body_part(self) -> _Part:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return _Part.CHUNK_SIZE
        length = self.headers.get("content-length")
        if self.status in (204, 304) or length == "0":
            return _Part.COMPLETE
        if length is None:
            return _Part.UNTIL_CLOSE
        if not length.isdigit():
            raise ValueError(f"Content-Length {length!r} is no number")
        self._missing = int(length)
        return _Part.SIZED


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line.partition(b";")[0], 16)
    except ValueError:
        size = -1
    if size < 0:
        raise ValueError(f"a chunk of size {line[:20]!r}")
    return size
