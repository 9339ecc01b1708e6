"""Gated activation: act(gate) * up."""

from __future__ import annotations

from torch import Tensor

from moe_serve.kernels.elementwise import gelu, silu

# Shapes: T rows, F inner size, G = 2F.


def gated_activation(gate_up_TG: Tensor, kind: str = "silu") -> Tensor:
    """[T, 2F], gate first -> [T, F] in the same dtype, rounded once. A row's bits are its own.

    `kind`: silu, gelu or gelu_tanh.
    """
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    if kind == "silu":
        acted_TF = silu(gate_TF)
    elif kind in ("gelu", "gelu_tanh"):
        acted_TF = gelu(gate_TF, tanh=kind == "gelu_tanh")
    else:
        raise ValueError(f"unknown activation {kind!r}")
    return acted_TF.mul_(up_TF).to(gate_up_TG.dtype)
