"""The kernel behind `grouped_gemm` and `linear`: rows times the weights of their expert.

Weights are the first operand of the product, rows the second: acc[weight rows, rows]. Tensor cores
want 64 or more of the first and as few as 16 of the second. So few rows and many are multiplied by
instructions that add along K alike, which is why a row's bits do not depend on its company.

A grid of as many programs as the GPU holds passes over the tiles of all experts; which expert and
which rows a tile has is found from the counts on the device. Experts without rows have no tiles.
(The persistent grouped GEMM of Triton's tutorial 08, with counts that the host need not know.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.jit import launch, target_of, tl, triton
from moe_serve.kernels.quantization import (
    FP8_BLOCK,
    Fp8Weight,
    Mxfp4Weight,
    Weight,
    decode_e2m1,
    decode_e4m3,
    quantize_rows,
)
from moe_serve.kernels.silu_mul import KINDS, gate
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
    out_RN = x_RD.new_empty((num_rows, num_columns))
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
        is_gated=is_gated,
        is_aligned=operands.are_aligned,
    )
    has_descriptors = target.has_descriptors and operands.are_aligned
    x, data = operands.x, operands.weight
    if has_descriptors:
        x = _described(x, tiles.block_m, tiles.block_k)
        packed = 2 if operands.format == "mxfp4" else 1
        data = _described(data, tiles.block_n, tiles.block_k // packed)
    launch(
        _gemm_kernel,
        (_num_programs(target, tiles, num_rows, num_columns, num_experts),),
        out_RN,
        # The operands.
        x,
        operands.x_scales,
        operands.x.stride(0),
        data,
        operands.weight_scales,
        operands.weight.stride(0),
        # What belongs to an expert or a row.
        counts_E,
        bias_EW,
        scatter_R,
        # Sizes.
        num_rows,
        num_experts,
        num_columns,
        width,
        ACTIVATION=activation,
        KIND=operands.kind,
        HAS_DESCRIPTORS=has_descriptors,
        # A tile's weight rows share the scale of a block.
        ONE_SCALE=FP8_BLOCK % tiles.block_n == 0 and (not is_gated or num_columns % FP8_BLOCK == 0),
        IS_EVEN=width % tiles.block_k == 0,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group_m,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **_options(target),
    )
    return out_RN


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
    parts = [weight] if isinstance(weight, Tensor) else dataclasses.astuple(weight)
    for part in (*parts, counts_E, bias_EW, scatter_R):
        assert part is None or (part.is_contiguous() and part.device == x_RD.device)
    if isinstance(weight, Tensor):
        assert weight.dtype == x_RD.dtype, f"{x_RD.dtype} rows, {weight.dtype} weights"
    if isinstance(weight, Mxfp4Weight):
        assert x_RD.element_size() == 2, f"{x_RD.dtype} rows, 4-bit weights"


def _options(target: Target) -> dict[str, Any]:
    # AMD's products for larger tiles add along K in other steps.
    return {"matrix_instr_nonkdim": 16} if target.is_amd else {}


def _num_programs(
    target: Target, tiles: GemmTiles, num_rows: int, num_columns: int, num_experts: int
) -> int:
    """Every expert may have a tile that its rows do not fill."""
    most_m = num_rows // tiles.block_m + min(num_experts, num_rows)
    most_tiles = most_m * -(-num_columns // tiles.block_n)
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
    operands: Format = "fp32" if x.dtype == torch.float32 else "16-bit"
    return _Operands(operands, "plain", x, None, weight.flatten(0, 1), None)


def _described(x: Tensor, *block: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, list(block))


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_kernel(
    out_ptr, x, x_scales_ptr, x_stride, weight, weight_scales_ptr, weight_stride,
    counts_ptr, bias_ptr, scatter_ptr, num_rows, num_experts, num_columns, width,
    ACTIVATION: tl.constexpr, KIND: tl.constexpr, HAS_DESCRIPTORS: tl.constexpr,
    ONE_SCALE: tl.constexpr, IS_EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    IS_GATED: tl.constexpr = ACTIVATION is not None
    weight_rows = num_columns * 2 if IS_GATED else num_columns
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    if counts_ptr is None:
        counts_E = tl.full((EXPERTS,), num_rows, tl.int32)
    else:
        ids = tl.arange(0, EXPERTS)
        counts_E = tl.load(counts_ptr + ids, mask=ids < num_experts, other=0).to(tl.int32)
    row_stops_E = tl.cumsum(counts_E, 0)
    tile_stops_E = tl.cumsum((counts_E + (BLOCK_M - 1)) // BLOCK_M, 0)
    num_tiles = tl.max(tile_stops_E, 0) * column_tiles
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        is_before = tile_stops_E * column_tiles <= index
        expert = tl.sum(is_before.to(tl.int32), 0)
        first = tl.max(tl.where(is_before, tile_stops_E, 0), 0) * column_tiles
        row_start = tl.max(tl.where(is_before, row_stops_E, 0), 0)
        row_stop = tl.min(tl.where(is_before, 0x7FFFFFFF, row_stops_E), 0)
        # An expert's tiles: by group of row tiles, then by column tile, then by row tile.
        row_tiles = tl.cdiv(row_stop - row_start, BLOCK_M)
        group = (index - first) // (GROUP_M * column_tiles)
        in_group = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
        rest = index - first - group * GROUP_M * column_tiles
        row = row_start + (group * GROUP_M + rest % in_group) * BLOCK_M
        column = rest // in_group * BLOCK_N

        # What overhangs repeats the last row or column, and is not stored.
        rows_M = row + tl.arange(0, BLOCK_M)
        columns_N = column + tl.arange(0, BLOCK_N)
        x_rows_M = tl.minimum(rows_M, num_rows - 1).to(tl.int64)
        own_N = tl.minimum(columns_N, num_columns - 1)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if IS_GATED:
            up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, width, BLOCK_K):
            x_MK = _load(x, row, x_rows_M, k, width, x_stride, BLOCK_K, HAS_DESCRIPTORS, IS_EVEN)
            acc = _add_product(
                acc, x_MK, x_scales_ptr, x_rows_M, weight, weight_scales_ptr, weight_stride,
                expert, weight_rows, column, own_N, k, width,
                KIND, HAS_DESCRIPTORS, ONE_SCALE, IS_EVEN, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if IS_GATED:
                up = _add_product(
                    up, x_MK, x_scales_ptr, x_rows_M, weight, weight_scales_ptr, weight_stride,
                    expert, weight_rows, num_columns + column, num_columns + own_N, k, width,
                    KIND, HAS_DESCRIPTORS, ONE_SCALE, IS_EVEN, BLOCK_N, BLOCK_K,
                )  # fmt: skip

        if bias_ptr is not None:
            bias_N = bias_ptr + expert.to(tl.int64) * weight_rows + own_N
            acc += tl.load(bias_N).to(tl.float32)[:, None]
            if IS_GATED:
                up += tl.load(bias_N + num_columns).to(tl.float32)[:, None]
        result = acc.to(dtype)
        if IS_GATED:
            # Both are rounded first, as an op of its own would find them.
            acted = gate(result.to(tl.float32), ACTIVATION)
            result = (acted * up.to(dtype).to(tl.float32)).to(dtype)
        is_own_M = rows_M < row_stop
        to_M = rows_M.to(tl.int64)
        if scatter_ptr is not None:
            to_M = tl.load(scatter_ptr + rows_M, mask=is_own_M, other=0).to(tl.int64)
        out = out_ptr + to_M[:, None] * num_columns + columns_N[None, :]
        tl.store(out, result.T, mask=is_own_M[:, None] & (columns_N < num_columns)[None, :])


@triton.jit
def _load(
    source, row, rows, k, width, stride,
    BLOCK_K: tl.constexpr, HAS_DESCRIPTORS: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of `rows`, of which `row` is the first, from column `k` on."""
    if HAS_DESCRIPTORS:
        return source.load([row, k])
    else:
        columns = k + tl.arange(0, BLOCK_K)
        pointers = source + rows[:, None] * stride + columns[None, :]
        if IS_EVEN:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(columns < width)[None, :], other=0.0)


@triton.jit
def _add_product(
    acc, x_MK, x_scales_ptr, x_rows_M, weight, scales_ptr, stride,
    expert, weight_rows, row, rows_N, k, width,
    KIND: tl.constexpr, HAS_DESCRIPTORS: tl.constexpr, ONE_SCALE: tl.constexpr,
    IS_EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + weights * rows for one step along K. `row`, `rows_N`: of this expert's weight rows."""
    first = expert * weight_rows + row
    all_rows_N = expert.to(tl.int64) * weight_rows + rows_N
    if KIND == "plain":
        w_NK = _load(weight, first, all_rows_N, k, width, stride, BLOCK_K, HAS_DESCRIPTORS, IS_EVEN)
        return tl.dot(w_NK, x_MK.T, acc, input_precision="ieee")
    elif KIND == "mxfp4":
        bytes_NK = _load(
            weight, first, all_rows_N, k // 2, width // 2, stride,
            BLOCK_K // 2, HAS_DESCRIPTORS, IS_EVEN,
        )  # fmt: skip
        w_NK = _mxfp4_values(bytes_NK, scales_ptr, all_rows_N, k, width, x_MK.dtype)
        return tl.dot(w_NK, x_MK.T, acc)
    else:
        w_NK = _load(weight, first, all_rows_N, k, width, stride, BLOCK_K, HAS_DESCRIPTORS, IS_EVEN)
        if KIND == "fp8 bytes":
            part = tl.dot(decode_e4m3(w_NK), decode_e4m3(x_MK).T)
        else:
            part = tl.dot(w_NK, x_MK.T)
        # Sums over 128 of K are scaled, and added outside of the tensor cores, whose own sums of
        # fp8 have too few bits (DeepSeek-V3, section 3.3.2).
        blocks = tl.cdiv(width, 128)
        x_scales_M = tl.load(x_scales_ptr + x_rows_M * blocks + k // 128)
        scales = scales_ptr + expert * tl.cdiv(weight_rows, 128) * blocks + k // 128
        if ONE_SCALE:
            both = (tl.load(scales + row // 128 * blocks) * x_scales_M)[None, :]
        else:
            both = tl.load(scales + rows_N // 128 * blocks)[:, None] * x_scales_M[None, :]
        return tl.fma(part, tl.broadcast_to(both, part.shape), acc)


@triton.jit
def _mxfp4_values(bytes_NK, scales_ptr, rows_N, k, width, dtype: tl.constexpr):
    """[N, K / 2] bytes -> [N, K] values in `dtype`."""
    BLOCK_N: tl.constexpr = bytes_NK.shape[0]
    BLOCKS: tl.constexpr = bytes_NK.shape[1] // 16
    codes = bytes_NK.to(tl.int32).reshape(BLOCK_N, BLOCKS, 16)
    blocks = k // 32 + tl.arange(0, BLOCKS)
    scales = tl.load(
        scales_ptr + rows_N[:, None] * (width // 32) + blocks[None, :],
        mask=(blocks < width // 32)[None, :],
        other=1,
    )
    scales = tl.clamp(scales.to(tl.int32), 1, 252)[:, :, None]
    even, odd = decode_e2m1(codes, scales, dtype), decode_e2m1(codes >> 4, scales, dtype)
    return tl.join(even, odd).reshape(BLOCK_N, BLOCKS * 32)
