"""Gated activation: act(gate) * up."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gated_activation(gate_up_TG: Tensor, kind: str = "silu") -> Tensor:
    """[T, 2F], gate first -> [T, F]. `kind`: silu, gelu or gelu_tanh."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate_TF) * up_TF
    if kind in ("gelu", "gelu_tanh"):
        return F.gelu(gate_TF, approximate="tanh" if kind == "gelu_tanh" else "none") * up_TF
    raise ValueError(f"unknown activation {kind!r}")
