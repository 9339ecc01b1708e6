"""The structures of native/api.h, field by field."""

from __future__ import annotations

import struct
from typing import Any

import torch

# As in api.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2}

# Field by field as in api.h: P a pointer, q an int64, i an int32, f a float. Bytes, since filling a
# `ctypes.Structure` takes four times as long, and a step of few tokens has hundreds of calls.
_WEIGHT = "P3q2i"
QuantizeCall = struct.Struct("@2P3q5i").pack
MoeCall = struct.Struct(f"@4P{_WEIGHT}{_WEIGHT}P2q3i").pack
GroupedCall = struct.Struct(f"@PqPq{_WEIGHT}3P3i").pack
NormCall = struct.Struct("@5P4qf2i").pack
AttentionInputsCall = struct.Struct("@11P8qf2i").pack
RouterCall = struct.Struct("@7P5qf3i").pack
AttentionCall = struct.Struct("@7P8q2f2i").pack
LimitCall = struct.Struct("@P2q2i").pack

# The fields of a weight.
WeightFields = tuple[int, int, int, int, int, int]


def address(tensor: torch.Tensor | None) -> int:
    """None is a null pointer."""
    return 0 if tensor is None else tensor.data_ptr()


def call(function: Any, arguments: bytes) -> None:
    """One kernel. Raises `MemoryError` where there is none left for its scratch space."""
    if function(arguments):
        raise MemoryError("no memory for the scratch space of a CPU kernel")
