"""One GEMM per expert over rows sorted by expert."""

from __future__ import annotations

from torch import Tensor

from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.cpu.products import grouped_gemm_activation_cpu, grouped_gemm_cpu
from moe_serve.kernels.gemm import multiply
from moe_serve.kernels.jit import by_device
from moe_serve.kernels.linear import linear_torch
from moe_serve.kernels.quantization import Fp8Weight, Weight, quantize_rows_torch
from moe_serve.kernels.silu_mul import gated_activation_torch

# Shapes: R rows sorted by expert, D in, N out, E experts, F inner, G = 2F (gate rows first).


def grouped_gemm_torch(
    x_RD: Tensor,
    weight_END: Weight | PackedWeight,
    counts_E: Tensor,
    *,
    bias_EN: Tensor | None = None,
    scatter_R: Tensor | None = None,
) -> Tensor:
    """Rows of expert e times weight_END[e].T, plus its bias -> [R, N] in x's dtype.

    `counts_E`: rows of each expert, integers on x's device. Rows past their sum belong to no
    expert, and their results are not defined. Experts without rows cost nothing.
    `scatter_R`: row r's result becomes row scatter_R[r]; each row occurs once.
    Rows meet an `Fp8Weight` in fp8 too (`quantize_rows`), a `Mxfp4Weight` in their 16 bits.
    A row's bits do not depend on the other rows.
    """
    assert not isinstance(weight_END, PackedWeight)
    out_RN = x_RD.new_zeros((x_RD.shape[0], weight_END.shape[1]))
    start = 0
    # On the CPU there is nothing to wait for.
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            stop = start + count
            bias_N = None if bias_EN is None else bias_EN[expert]
            product = _expert_product(x_RD[start:stop], weight_END, expert, bias_N)
            if scatter_R is None:
                out_RN[start:stop] = product
            else:
                out_RN.index_copy_(0, scatter_R[start:stop], product)
            start = stop
    return out_RN


def _expert_product(x_RD: Tensor, weight: Weight, expert: int, bias_N: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        return linear_torch(x_RD, weight[expert], bias_N)
    is_fp8 = isinstance(weight, Fp8Weight)
    rows_RD = quantize_rows_torch(x_RD).dequantize() if is_fp8 else x_RD.float()
    bias_N = None if bias_N is None else bias_N.float()
    return linear_torch(rows_RD, weight.dequantize(expert), bias_N).to(x_RD.dtype)


def grouped_gemm_triton(
    x_RD: Tensor,
    weight_END: Weight | PackedWeight,
    counts_E: Tensor,
    *,
    bias_EN: Tensor | None = None,
    scatter_R: Tensor | None = None,
) -> Tensor:
    assert not isinstance(weight_END, PackedWeight)
    return multiply(x_RD, weight_END, counts_E, bias_EW=bias_EN, scatter_R=scatter_R)


grouped_gemm = by_device(grouped_gemm_triton, grouped_gemm_torch, grouped_gemm_cpu)


def grouped_gemm_activation_torch(
    x_RD: Tensor,
    gate_up_EGD: Weight | PackedWeight,
    counts_E: Tensor,
    activation: str,
    *,
    bias_EG: Tensor | None = None,
) -> Tensor:
    """act(gate) * up of each row, by its expert -> [R, F] in x's dtype.

    As `gated_activation(grouped_gemm(...))`, in which gate and up are rounded to x's dtype, without
    these in memory. `activation`: silu, gelu or gelu_tanh. The rest is as in `grouped_gemm`.
    """
    gate_up_RG = grouped_gemm_torch(x_RD, gate_up_EGD, counts_E, bias_EN=bias_EG)
    return gated_activation_torch(gate_up_RG, activation)


def grouped_gemm_activation_triton(
    x_RD: Tensor,
    gate_up_EGD: Weight | PackedWeight,
    counts_E: Tensor,
    activation: str,
    *,
    bias_EG: Tensor | None = None,
) -> Tensor:
    assert not isinstance(gate_up_EGD, PackedWeight)
    return multiply(x_RD, gate_up_EGD, counts_E, bias_EW=bias_EG, activation=activation)


grouped_gemm_activation = by_device(
    grouped_gemm_activation_triton, grouped_gemm_activation_torch, grouped_gemm_activation_cpu
)
