"""The kernel behind `grouped_gemm` and `linear`: rows times the weights of their expert.

Weights are the first operand of the product, rows the second: acc[weight rows, rows]. Tensor cores
want 64 or more of the first and as few as 16 of the second. So few rows and many are multiplied by
instructions that add along K alike, which is why a row's bits do not depend on its company.

A grid of as many programs as the GPU holds passes over the tiles of all experts; which expert and
which rows a tile has is found from the counts on the device. Experts without rows have no tiles.
(The persistent grouped GEMM of Triton's tutorial 08, with counts that the host need not know.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.gemm_kernel import add_slices_kernel, gemm_kernel
from moe_serve.kernels.jit import TensorDescriptor, launch, target_of, triton
from moe_serve.kernels.quantization import (
    FP8_BLOCK,
    Fp8Weight,
    Mxfp4Weight,
    Weight,
    quantize_rows,
)
from moe_serve.kernels.silu_mul import KINDS
from moe_serve.kernels.targets import Target
from moe_serve.kernels.tiles import Format, GemmTiles, gemm_tiles

# Shapes: R rows sorted by expert, D in, N out, E experts, W weight rows of an expert: N, or gate
# and up, 2N.


def multiply(
    x_RD: Tensor,
    weight: Weight,
    counts_E: Tensor | None = None,
    *,
    bias_EW: Tensor | None = None,
    scatter_R: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """[R, N]; see `grouped_gemm` and `grouped_gemm_activation`. No counts: one expert has all."""
    _check(x_RD, weight, counts_E, bias_EW, scatter_R, activation)
    num_rows, width = x_RD.shape
    num_experts, weight_rows = weight.shape[:2]
    is_gated = activation is not None
    num_columns = weight_rows // 2 if is_gated else weight_rows
    dtype = weight.dtype if isinstance(weight, Tensor) else x_RD.dtype
    out_RN = x_RD.new_empty((num_rows, num_columns), dtype=dtype)
    if 0 in (num_rows, num_experts, num_columns):
        return out_RN
    target = target_of(x_RD)
    operands = _operands(x_RD, weight, target)
    tiles = gemm_tiles(
        target,
        operands.format,
        num_rows=num_rows,
        num_experts=num_experts,
        num_columns=num_columns,
        width=width,
        is_gated=is_gated,
        has_bias=bias_EW is not None,
        is_aligned=operands.are_aligned,
    )
    own = _OfExperts(counts_E, bias_EW, scatter_R, num_experts)
    if tiles.slices == 1:
        _launch(out_RN, operands, own, activation, tiles, target)
        return out_RN
    parts = out_RN.new_empty((tiles.slices, *out_RN.shape))
    _launch(parts, operands, own, activation, tiles, target)
    size, block = out_RN.numel(), 1024
    grid = (triton.cdiv(size, block),)
    launch(add_slices_kernel, grid, parts, out_RN, size, SLICES=tiles.slices, BLOCK=block)
    return out_RN


class _OfExperts(NamedTuple):
    counts_E: Tensor | None
    bias_EW: Tensor | None
    scatter_R: Tensor | None
    num_experts: int


def _launch(
    out: Tensor,
    operands: _Operands,
    own: _OfExperts,
    activation: str | None,
    tiles: GemmTiles,
    target: Target,
) -> None:
    """`out` [R, N], or [slices, R, N]."""
    (num_rows, num_columns), width = out.shape[-2:], operands.width
    x, weight = operands.x, operands.weight
    has_descriptors = target.has_descriptors and operands.are_aligned
    if has_descriptors:
        x, weight = _described(operands, tiles)
    launch(
        gemm_kernel,
        (_num_programs(target, tiles, num_rows, num_columns, own.num_experts),),
        out,
        # The operands.
        x,
        operands.x_scales,
        operands.x.stride(0),
        weight,
        operands.weight_scales,
        operands.weight.stride(0),
        *own[:3],
        # Sizes.
        num_rows,
        own.num_experts,
        num_columns,
        width,
        ACTIVATION=activation,
        KIND=operands.kind,
        HAS_DESCRIPTORS=has_descriptors,
        ONE_SCALE=_has_one_scale(tiles, num_columns, activation is not None),
        IS_EVEN=width % tiles.block_k == 0,
        EXPERTS=triton.next_power_of_2(own.num_experts),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group_m,
        SLICES=tiles.slices,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **_options(target),
    )


def _has_one_scale(tiles: GemmTiles, num_columns: int, is_gated: bool) -> bool:
    """Whether all weight rows of a tile are in one block of fp8."""
    return FP8_BLOCK % tiles.block_n == 0 and (not is_gated or num_columns % FP8_BLOCK == 0)


def _check(
    x_RD: Tensor,
    weight: Weight,
    counts_E: Tensor | None,
    bias_EW: Tensor | None,
    scatter_R: Tensor | None,
    activation: str | None,
) -> None:
    if activation is not None and activation not in KINDS:
        raise ValueError(f"unknown activation {activation!r}")
    num_experts, weight_rows, width = weight.shape
    assert x_RD.shape[1] == width, f"rows of {x_RD.shape[1]}, weights of {width}"
    assert counts_E is None or counts_E.shape == (num_experts,)
    assert counts_E is not None or num_experts == 1
    assert bias_EW is None or bias_EW.shape == (num_experts, weight_rows)
    assert scatter_R is None or scatter_R.shape == x_RD.shape[:1]
    data: tuple[Tensor, ...]
    if isinstance(weight, Fp8Weight):
        data = weight.data_END, weight.scales
    elif isinstance(weight, Mxfp4Weight):
        data = weight.blocks, weight.scales
        assert x_RD.element_size() == 2, f"{x_RD.dtype} rows, 4-bit weights"
    else:
        data = (weight,)
        dtypes = x_RD.dtype, weight.dtype
        assert weight.dtype in (x_RD.dtype, torch.float32), f"{dtypes[0]} rows, {dtypes[1]} weights"
    for part in (*data, counts_E, bias_EW, scatter_R):
        assert part is None or (part.is_contiguous() and part.device == x_RD.device)


def _options(target: Target) -> dict[str, Any]:
    # AMD's products for larger tiles add along K in other steps.
    return {"matrix_instr_nonkdim": 16} if target.is_amd else {}


def _num_programs(
    target: Target, tiles: GemmTiles, num_rows: int, num_columns: int, num_experts: int
) -> int:
    """Every expert may have a tile that its rows do not fill."""
    most_m = num_rows // tiles.block_m + min(num_experts, num_rows)
    most_tiles = most_m * -(-num_columns // tiles.block_n) * tiles.slices
    return min(most_tiles, tiles.programs * target.num_processors)


class _Operands(NamedTuple):
    """Both factors as the kernel reads them; `weight` [E * W, bytes or numbers of a row]."""

    format: Format
    kind: str
    x: Tensor
    x_scales: Tensor | None
    weight: Tensor
    weight_scales: Tensor | None

    @property
    def width(self) -> int:
        return self.x.shape[1]

    @property
    def are_aligned(self) -> bool:
        """To 16 bytes, as loads by the memory engine, and the widest by threads, must be."""
        return all(
            part.data_ptr() % 16 == 0 and part.stride(0) * part.element_size() % 16 == 0
            for part in (self.x, self.weight)
        )


def _operands(x_RD: Tensor, weight: Weight, target: Target) -> _Operands:
    x = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    if isinstance(weight, Fp8Weight):
        x, x_scales = quantize_rows(x)
        data = weight.data_END.flatten(0, 1)
        if target.has_fp8:
            return _Operands("fp8", "fp8", x, x_scales, data, weight.scales)
        x, data = x.view(torch.uint8), data.view(torch.uint8)
        return _Operands("fp8", "fp8 bytes", x, x_scales, data, weight.scales)
    if isinstance(weight, Mxfp4Weight):
        data = weight.blocks.flatten(2).flatten(0, 1)
        return _Operands("mxfp4", "mxfp4", x, None, data, weight.scales)
    operands: Format = "fp32" if weight.dtype == torch.float32 else "16-bit"
    return _Operands(operands, "plain", x, None, weight.flatten(0, 1), None)


def _described(operands: _Operands, tiles: GemmTiles) -> tuple[Any, Any]:
    """Descriptors of the tiles of both."""
    packed = 2 if operands.format == "mxfp4" else 1
    x_block = [tiles.block_m, tiles.block_k]
    weight_block = [tiles.block_n, tiles.block_k // packed]
    return (
        TensorDescriptor.from_tensor(operands.x, x_block),
        TensorDescriptor.from_tensor(operands.weight, weight_block),
    )
