"""How messages travel between the processes: msgpack of [class name, fields]."""

from __future__ import annotations

from typing import Any

import msgspec

from moe_serve.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    FromEngine,
    Shutdown,
    ToEngine,
)

_CLASSES: tuple[type, ...] = (
    AbortRequests, AddRequest, EngineFailed, EngineOutputs, EngineReady, Shutdown,
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in _CLASSES
}


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode((type(message).__name__, message))


def decode(data: bytes) -> Any:
    """The message as it was; a fault of ours, never a client's, if that fails."""
    name, body = _envelope.decode(data)
    return _decoders[name].decode(body)
