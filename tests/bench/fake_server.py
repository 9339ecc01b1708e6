"""A server of the OpenAI API that answers with prepared bytes, in a thread of its own.

What it answers is the first part of the path: http://HOST:PORT/NAME is a base URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Pieces to write one after another; None closes the connection.
Answer = list[bytes | None]


def event(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def token(text: str, finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **fields})


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(num_input: int, num_output: int) -> bytes:
    counts = {"prompt_tokens": num_input, "completion_tokens": num_output}
    return event({"choices": [], "usage": counts})


DONE = event("[DONE]")
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(*events: bytes) -> Answer:
    """Each event in a packet and chunk of its own."""
    return [STREAM_HEAD, *map(chunked, events), b"0\r\n\r\n"]


def answer(status: str, value: Any) -> Answer:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
    return [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body]


class FakeServer:
    """`answers`: name -> what to answer a request, which is its path and JSON."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: dict[str, Callable[[str, Any], Answer]] = {}
        # (name, path, JSON) of each request, in order.
        self.asked: list[tuple[str, str, Any]] = []
        self.num_connections = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    def bodies(self, name: str) -> list[Any]:
        """Those of loads alone."""
        return [body for who, path, body in self.asked if who == name and "completions" in path]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._answer(reader, writer):
                    pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.lower().split("\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
        data = await reader.readexactly(length)
        body = json.loads(data) if data else None
        _, name, path = head.split(" ")[1].split("/", 2)
        self.asked.append((name, path, body))
        for piece in self.answers[name](path, body):
            if piece is None:
                return False
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        # urllib asks so, and waits for the end of the connection where it is not sent.
        return "connection: close" not in lines


def echo(path: str, body: Any) -> Answer:
    """A whole server: one model, tokens 10 to 19, and as many tokens as were asked for."""
    if path == "v1/models":
        return answer("200 OK", {"data": [{"id": "fake", "max_model_len": 512}]})
    if path == "version":
        return answer("200 OK", {"version": "7.1"})
    if path == "tokenize":
        return answer("200 OK", {"tokens": [10 + ord(letter) % 10 for letter in body["prompt"]]})
    count = body["max_tokens"]
    if path == "v1/chat/completions":
        words = [delta(content="a") for _ in range(count)]
        return stream(delta(role="assistant", content=""), *words, delta("stop"), usage(9, count),
                      DONE)  # fmt: skip
    words = [token("a", "length" if n == count - 1 else None) for n in range(count)]
    return stream(*words, usage(len(body["prompt"]), count), DONE)


@contextlib.contextmanager
def running() -> Iterator[FakeServer]:
    loop = asyncio.new_event_loop()
    server = FakeServer(0)
    listening: asyncio.Server = loop.run_until_complete(
        asyncio.start_server(server.serve, "127.0.0.1", 0)
    )
    server.port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_stop(listening), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(listening: asyncio.Server) -> None:
    listening.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(3):  # the transports close in the next rounds of the loop
        await asyncio.sleep(0)
