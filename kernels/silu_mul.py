"""Gated activation: act(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.elementwise import gelu, silu
from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.row_tiles import elementwise_tiles

# Shapes: T rows, F inner size, G = 2F.

KINDS = ("silu", "gelu", "gelu_tanh")


def gated_activation_torch(gate_up_TG: Tensor, kind: str = "silu") -> Tensor:
    """[T, 2F], gate first -> [T, F] in the same dtype, rounded once. A row's bits are its own.

    `kind`: silu, gelu or gelu_tanh.
    """
    _check(kind)
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    acted_TF = silu(gate_TF) if kind == "silu" else gelu(gate_TF, tanh=kind == "gelu_tanh")
    return acted_TF.mul_(up_TF).to(gate_up_TG.dtype)


def gated_activation_triton(gate_up_TG: Tensor, kind: str = "silu") -> Tensor:
    _check(kind)
    num_rows, inner = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
    assert gate_up_TG.shape[1] == 2 * inner and gate_up_TG.stride(1) == 1
    out_TF = torch.empty(num_rows, inner, dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    tiles = elementwise_tiles(inner)
    launch(
        _gated_activation_kernel,
        (triton.cdiv(num_rows, tiles.rows), triton.cdiv(inner, tiles.columns)),
        gate_up_TG,
        out_TF,
        num_rows,
        inner,
        gate_up_TG.stride(0),
        KIND=kind,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )
    return out_TF


gated_activation = by_device(gated_activation_triton, gated_activation_torch)


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown activation {kind!r}")


@triton.jit
def gate(x, KIND: tl.constexpr):
    """The activation of an fp32 tile."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh u) / 2 = 1 / (1 + e^-2u), here for u = sqrt(2 / pi) * (x + 0.044715 x^3).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    num_rows,
    inner,
    row_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (rows < num_rows) & (columns < inner)
    at = gate_up_ptr + rows * row_stride + columns
    acted = gate(tl.load(at, mask=mask, other=0.0).to(tl.float32), KIND)
    up = tl.load(at + inner, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * inner + columns, (acted * up).to(out_ptr.dtype.element_ty), mask=mask)
