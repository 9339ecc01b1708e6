"""The body of `gemm.py`: a persistent product of rows with the weights of their experts."""

from __future__ import annotations

from moe_serve.kernels.jit import tl, triton
from moe_serve.kernels.quantization import decode_e2m1, decode_e4m3
from moe_serve.kernels.silu_mul import gate


@triton.jit(do_not_specialize=["num_rows"])
def gemm_kernel(
    out_ptr, x, x_scales_ptr, x_stride, weight, weight_scales_ptr, weight_stride,
    counts_ptr, bias_ptr, scatter_ptr, num_rows, num_experts, num_columns, width,
    ACTIVATION: tl.constexpr, KIND: tl.constexpr, HAS_DESCRIPTORS: tl.constexpr,
    ONE_SCALE: tl.constexpr, IS_EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SLICES: tl.constexpr,
):  # fmt: skip
    """`out_ptr`: [R, N], or [SLICES, R, N], to be added up.

    KIND: "plain", "fp8", "fp8 bytes" or "mxfp4". HAS_DESCRIPTORS: `x` and `weight` are those of
    their tiles, else pointers. ONE_SCALE: a tile's weight rows share the scale of a block.
    IS_EVEN: `width` divides by BLOCK_K. EXPERTS: a power of two, no less than there are.
    """
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
    slice_width = tl.cdiv(width, SLICES * BLOCK_K) * BLOCK_K
    for work in range(tl.program_id(0), num_tiles * SLICES, tl.num_programs(0)):
        index, part = work // SLICES, work % SLICES
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
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if bias_ptr is not None:
            # Sums start from the bias: added at the end, it would cost registers.
            bias_N = bias_ptr + expert.to(tl.int64) * weight_rows + own_N
            acc += tl.where(part == 0, tl.load(bias_N).to(tl.float32), 0.0)[:, None]
            if IS_GATED:
                up += tl.load(bias_N + num_columns).to(tl.float32)[:, None]
        stop = width if SLICES == 1 else tl.minimum(width, (part + 1) * slice_width)
        for k in range(part * slice_width, stop, BLOCK_K):
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

        result = acc.to(dtype)
        if IS_GATED:
            # Both are rounded first, as an op of its own would find them.
            acted = gate(result.to(tl.float32), ACTIVATION)
            result = (acted * up.to(dtype).to(tl.float32)).to(dtype)
        is_own_M = rows_M < row_stop
        to_M = rows_M.to(tl.int64)
        if scatter_ptr is not None:
            to_M = tl.load(scatter_ptr + rows_M, mask=is_own_M, other=0).to(tl.int64)
        if SLICES > 1:
            to_M += part * num_rows
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
        # Of a router, rows have fewer bits than weights.
        return tl.dot(w_NK, x_MK.to(w_NK.dtype).T, acc, input_precision="ieee")
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
        # Loaded here, though waited for: before the product they would cost registers that spill.
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
    # Not clamp: Triton 3.6 has it for floats only.
    scales = tl.minimum(tl.maximum(scales.to(tl.int32), 1), 252)[:, :, None]
    even, odd = decode_e2m1(codes, scales, dtype), decode_e2m1(codes >> 4, scales, dtype)
    return tl.join(even, odd).reshape(BLOCK_N, BLOCKS * 32)


@triton.jit(do_not_specialize=["size"])
def add_slices_kernel(parts_ptr, out_ptr, size, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    """SLICES runs of `size` numbers, added in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts_ptr + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, SLICES):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(out_ptr + at, total, mask=at < size)
