"""The structures of native/api.h, field by field."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

# As in api.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2}

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class WeightStruct(ctypes.Structure):
    _fields_ = [
        ("data", _POINTER), ("experts", _LONG), ("rows", _LONG), ("columns", _LONG),
        ("bits", _INT), ("group", _INT),
    ]  # fmt: skip


class QuantizeCall(ctypes.Structure):
    _fields_ = [
        ("from", _POINTER), ("to", _POINTER), ("matrices", _LONG), ("rows", _LONG),
        ("columns", _LONG), ("dtype", _INT), ("bits", _INT), ("group", _INT),
        ("is_paired", _INT), ("threads", _INT),
    ]  # fmt: skip


class MoeCall(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), ("ids", _POINTER), ("weights", _POINTER), ("index_of", _POINTER),
        ("gate_up", WeightStruct), ("down", WeightStruct), ("out", _POINTER),
        ("tokens", _LONG), ("top_k", _LONG),
        ("dtype", _INT), ("activation", _INT), ("threads", _INT),
    ]  # fmt: skip


class GroupedCall(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), ("row_stride", _LONG), ("counts", _POINTER), ("rows", _LONG),
        ("weight", WeightStruct), ("bias", _POINTER), ("scatter", _POINTER), ("out", _POINTER),
        ("dtype", _INT), ("activation", _INT), ("threads", _INT),
    ]  # fmt: skip


class NormCall(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), ("y", _POINTER), ("weight", _POINTER), ("total", _POINTER),
        ("out", _POINTER), ("rows", _LONG), ("width", _LONG), ("x_stride", _LONG),
        ("y_stride", _LONG), ("eps", _FLOAT), ("dtype", _INT), ("threads", _INT),
    ]  # fmt: skip


class AttentionInputsCall(ctypes.Structure):
    _fields_ = [
        ("q", _POINTER), ("k", _POINTER), ("v", _POINTER), ("cos", _POINTER), ("sin", _POINTER),
        ("q_weight", _POINTER), ("k_weight", _POINTER), ("slots", _POINTER), ("out", _POINTER),
        ("keys", _POINTER), ("values", _POINTER), ("tokens", _LONG), ("q_stride", _LONG),
        ("k_stride", _LONG), ("v_stride", _LONG), ("heads", _LONG), ("kv_heads", _LONG),
        ("head_dim", _LONG), ("rotary_dim", _LONG), ("eps", _FLOAT), ("dtype", _INT),
        ("threads", _INT),
    ]  # fmt: skip


class RouterCall(ctypes.Structure):
    _fields_ = [
        ("logits", _POINTER), ("bias", _POINTER), ("ids", _POINTER), ("weights", _POINTER),
        ("load", _POINTER), ("phases", _POINTER), ("num_valid", _POINTER), ("tokens", _LONG),
        ("experts", _LONG), ("top_k", _LONG), ("groups", _LONG), ("top_groups", _LONG),
        ("scale", _FLOAT), ("is_sigmoid", _INT), ("renormalize", _INT), ("threads", _INT),
    ]  # fmt: skip


class AttentionCall(ctypes.Structure):
    _fields_ = [
        ("q", _POINTER), ("keys", _POINTER), ("values", _POINTER), ("tables", _POINTER),
        ("query_starts", _POINTER), ("context_lens", _POINTER), ("out", _POINTER),
        ("sequences", _LONG), ("table_stride", _LONG), ("block_size", _LONG), ("q_stride", _LONG),
        ("heads", _LONG), ("kv_heads", _LONG), ("head_dim", _LONG), ("window", _LONG),
        ("scale", _FLOAT), ("value_scale", _FLOAT), ("dtype", _INT), ("threads", _INT),
    ]  # fmt: skip


class LimitCall(ctypes.Structure):
    _fields_ = [
        ("data", _POINTER), ("bytes", _LONG), ("rounds", _LONG), ("dtype", _INT), ("threads", _INT),
    ]  # fmt: skip


def address(tensor: torch.Tensor | None) -> int | None:
    """None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def call(function: Any, arguments: ctypes.Structure) -> None:
    """One kernel. Raises `MemoryError` where there is none left for its scratch space."""
    if function(ctypes.byref(arguments)):
        raise MemoryError("no memory for the scratch space of a CPU kernel")
