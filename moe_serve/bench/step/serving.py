"""What a server adds to a step: the messages between its processes, text, and events.

In one process and one after the other, so that each can be timed alone; sockets and asyncio are
not in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from moe_serve import wire
from moe_serve.api.encoding import encode
from moe_serve.api.schemas.completions import CompletionChoice, CompletionResponse
from moe_serve.api.sse import event
from moe_serve.bench.step.measure import Answerer
from moe_serve.bench.step.probes import Recorder
from moe_serve.messages import AddRequest, EngineOutputs, RequestUpdate
from moe_serve.output import OutputAssembler, OutputDelta
from moe_serve.tokenizer import Tokenizer

SEND_REQUEST = "API: encode request"
READ_REQUEST = "engine: decode request"
SEND_OUTPUTS = "engine: encode outputs"
READ_OUTPUTS = "API: decode outputs"
DETOKENIZE = "API: detokenise"
FORMAT = "API: format events"
PARTS = (SEND_REQUEST, READ_REQUEST, SEND_OUTPUTS, READ_OUTPUTS, DETOKENIZE, FORMAT)


class ServedStep(Answerer):
    """The way of a step's messages through a server, recorded part by part."""

    def __init__(self, tokenizer: Tokenizer, recorder: Recorder) -> None:
        self._tokenizer = tokenizer
        self._assemblers: dict[str, OutputAssembler] = {}
        self._created = int(time.time())
        timed = recorder.timed
        self._send_requests = timed(self._encode_all, SEND_REQUEST)
        self._read_requests = timed(self._decode_all, READ_REQUEST)
        self._send_outputs = timed(wire.encode, SEND_OUTPUTS)
        self._read_outputs = timed(wire.decode, READ_OUTPUTS)
        self._detokenize = timed(self._feed, DETOKENIZE)
        self._format = timed(self._events, FORMAT)

    def bring(self, requests: Sequence[AddRequest]) -> None:
        """New requests go to the engine, and their sequences are followed from here on."""
        self._read_requests(self._send_requests(requests))
        self.follow(requests)

    def follow(self, requests: Sequence[AddRequest]) -> None:
        for request in requests:
            self._assemblers[request.request_id] = OutputAssembler(
                request.request_id, self._tokenizer, request.sampling, request.prompt_token_ids
            )

    def answer(self, outputs: EngineOutputs) -> list[bytes]:
        """What the clients are sent for a step, as streamed /v1/completions are."""
        received: EngineOutputs = self._read_outputs(self._send_outputs(outputs))
        deltas = self._detokenize(received.updates)
        events: list[bytes] = self._format(deltas)
        return events

    def _encode_all(self, requests: Sequence[AddRequest]) -> list[bytes]:
        return [wire.encode(request) for request in requests]

    def _decode_all(self, messages: Sequence[bytes]) -> list[AddRequest]:
        return [wire.decode(message) for message in messages]

    def _feed(self, updates: Sequence[RequestUpdate]) -> list[OutputDelta]:
        return [self._assemblers[update.request_id].feed(update) for update in updates]

    def _events(self, deltas: Sequence[OutputDelta]) -> list[bytes]:
        return [event(encode(self._chunk(delta))) for delta in deltas if delta.shows]

    def _chunk(self, delta: OutputDelta) -> CompletionResponse:
        choice = CompletionChoice(
            index=0,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return CompletionResponse(
            id=f"cmpl-{delta.request_id}", created=self._created, model="model", choices=[choice]
        )
