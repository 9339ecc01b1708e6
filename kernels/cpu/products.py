"""Linear layers and experts on packed weights. Each declines, by None, what is not packed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.cpu.calls import (
    ACTIVATIONS,
    DTYPES,
    GroupedCall,
    MoeCall,
    address,
    call,
)
from moe_serve.kernels.cpu.library import Library, active
from moe_serve.kernels.cpu.packed import PackedWeight

# Shapes: T tokens, K top-k, R rows sorted by expert, D in, N out, E experts, F inner, G = 2F.


def linear_cpu(x_TD: Tensor, weight_ND: object, bias_N: Tensor | None = None) -> Tensor | None:
    if not isinstance(weight_ND, PackedWeight):
        return None
    library, dtype, num_rows = _library(), weight_ND.dtype, x_TD.shape[0]
    if x_TD.dtype is not dtype:
        x_TD = x_TD.to(dtype)
    stride, inner = x_TD.stride()
    if inner != 1:
        x_TD = x_TD.contiguous()
        stride = x_TD.stride(0)
    out_TN = torch.empty(num_rows, weight_ND.fields[2], dtype=dtype)
    if num_rows:
        arguments = GroupedCall(
            x_TD.data_ptr(), stride, 0, num_rows,
            *weight_ND.fields, address(bias_N), 0, out_TN.data_ptr(), weight_ND.type_code, 0,
            library.num_threads,
        )  # fmt: skip
        call(library.kernels.moe_serve_grouped, arguments)
    return out_TN


def linear_activation_cpu(x_TD: Tensor, gate_up_GD: PackedWeight, activation: str) -> Tensor:
    """act(gate) * up of each row -> [T, F], as `gated_activation(linear(...))`."""
    return _activated(x_TD, gate_up_GD, None, activation)


def grouped_gemm_cpu(
    x_RD: Tensor,
    weight_END: object,
    counts_E: Tensor,
    *,
    bias_EN: Tensor | None = None,
    scatter_R: Tensor | None = None,
) -> Tensor | None:
    if not isinstance(weight_END, PackedWeight):
        return None
    library, dtype = _library(), weight_END.dtype
    assert x_RD.dtype == dtype and x_RD.is_contiguous() and counts_E.dtype == torch.int64
    # Rows that belong to no expert are not computed: callers may look at them, at zeros.
    out_RN = torch.zeros(x_RD.shape[0], weight_END.shape[1], dtype=dtype)
    counts_E = counts_E.contiguous()
    arguments = GroupedCall(
        x_RD.data_ptr(), x_RD.shape[1], counts_E.data_ptr(), 0,
        *weight_END.fields, address(bias_EN), address(scatter_R), out_RN.data_ptr(),
        DTYPES[dtype], 0, library.num_threads,
    )  # fmt: skip
    call(library.kernels.moe_serve_grouped, arguments)
    return out_RN


def grouped_gemm_activation_cpu(
    x_RD: Tensor,
    gate_up_EGD: object,
    counts_E: Tensor,
    activation: str,
    *,
    bias_EG: Tensor | None = None,
) -> Tensor | None:
    if not isinstance(gate_up_EGD, PackedWeight):
        return None
    assert bias_EG is None and counts_E.dtype == torch.int64
    return _activated(x_RD, gate_up_EGD, counts_E.contiguous(), activation)


def _activated(
    x_RD: Tensor, packed: PackedWeight, counts_E: Tensor | None, activation: str
) -> Tensor:
    assert packed.is_paired and x_RD.dtype == packed.dtype and x_RD.stride(1) == 1
    library = _library()
    # As in `grouped_gemm_cpu`; without counts every row is computed.
    make = torch.empty if counts_E is None else torch.zeros
    out_RF = make(x_RD.shape[0], packed.shape[-2] // 2, dtype=packed.dtype)
    if x_RD.shape[0]:
        arguments = GroupedCall(
            x_RD.data_ptr(), x_RD.stride(0), address(counts_E), x_RD.shape[0],
            *packed.fields, 0, 0, out_RF.data_ptr(), DTYPES[packed.dtype],
            ACTIVATIONS[activation], library.num_threads,
        )  # fmt: skip
        call(library.kernels.moe_serve_grouped, arguments)
    return out_RF


def moe_cpu(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_EGD: PackedWeight,
    down_EDF: PackedWeight,
    activation: str,
    index_of_E: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts -> [T, D] in x's dtype, in one call.

    As `permute`, `take_rows`, the two grouped products, and `weigh_rows`, bit for bit. `ids_TK`
    int64, -1: none; `weights_TK` fp32; `index_of_E` int64: where an id's expert lies.
    """
    library = _library()
    (num_tokens, top_k), dtype = ids_TK.shape, gate_up_EGD.dtype
    assert x_TD.dtype == dtype and x_TD.is_contiguous() and ids_TK.is_contiguous()
    assert ids_TK.dtype == torch.int64 and weights_TK.dtype == torch.float32
    out_TD = torch.empty(num_tokens, down_EDF.shape[1], dtype=dtype)
    if num_tokens:
        arguments = MoeCall(
            x_TD.data_ptr(), ids_TK.data_ptr(), weights_TK.contiguous().data_ptr(),
            address(index_of_E), *gate_up_EGD.fields, *down_EDF.fields, out_TD.data_ptr(),
            num_tokens, top_k, DTYPES[dtype], ACTIVATIONS[activation], library.num_threads,
        )  # fmt: skip
        call(library.kernels.moe_serve_moe, arguments)
    return out_TD


def _library() -> Library:
    library = active()
    assert library is not None, "weights were packed for kernels that are gone"
    return library
