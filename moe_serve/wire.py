"""How messages travel between the processes: msgpack of [class name, fields]."""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from moe_serve.messages import FromEngine, ToEngine
from moe_serve.rank_messages import FromRank, ToRank

Message = ToEngine | FromEngine | ToRank | FromRank

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in typing.get_args(Message)
}


def encode(message: Message) -> bytes:
    return _encoder.encode((type(message).__name__, message))


def decode(data: bytes) -> Any:
    """The message as it was; a fault of ours, never a client's, if that fails."""
    name, body = _envelope.decode(data)
    return _decoders[name].decode(body)
