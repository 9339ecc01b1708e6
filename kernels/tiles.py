"""How a product of rows and weights is cut into tiles, from plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from moe_serve.kernels.targets import Target

# How operands are stored: both in 16 bits, both in fp32, both in fp8, or 4-bit weights and
# 16-bit rows.
Format = Literal["16-bit", "fp32", "fp8", "mxfp4"]
FORMATS: tuple[Format, ...] = ("16-bit", "fp32", "fp8", "mxfp4")

# Shared memory that a program needs besides its operands: barriers and reductions over experts.
_RESERVE = 4096
_MOST_STAGES = 8


class GemmTiles(NamedTuple):
    """A tile is block_m rows by block_n weight rows; twice as many of these where gate and up are
    multiplied together. `group_m` tiles of one expert's rows share a weight tile before the next
    one is read. `programs`: how many run on one processor at a time. `slices`: parts of K whose
    sums are added at the end, in order.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    programs: int
    slices: int = 1


def gemm_tiles(
    target: Target,
    operands: Format,
    *,
    num_rows: int,
    num_experts: int,
    num_columns: int,
    width: int,
    is_gated: bool,
    has_bias: bool = False,
    is_aligned: bool = True,
) -> GemmTiles:
    """`num_columns` of the result, `width` of the rows. Of rows per expert, only the mean is known.

    `is_aligned`: rows of both operands start at multiples of 16 bytes. Rows may change how large a
    tile is, never the order of the sum over K: `block_k` is one number per format, and each product
    is of the same kind (see `gemm.py`).
    """
    if operands == "fp32":
        return _fp32_tiles(target, num_rows, width, is_gated)
    if not is_aligned:
        # Numbers one by one, which take many registers on their way.
        return _tiles(target, operands, 16, 64, is_gated, num_warps=8)
    mean = -(-num_rows // num_experts)
    # Experts are not used evenly: most should still need one tile, whose weights are read once.
    wanted = mean if num_experts == 1 else 2 * mean
    if wanted <= 64:
        block_m = next(block for block in (16, 32, 64) if block >= wanted)
        most_tiles = min(num_rows, num_experts) * -(-num_columns // 128)
        is_short = most_tiles < 4 * target.num_processors
        block_n = 64 if is_short or is_gated else 128
        return _largest(target, operands, ((block_m, block_n), (block_m, 64), (32, 64)), is_gated)
    largest = (256, 128) if mean >= 1024 and operands == "16-bit" else (128, 256)
    sizes = [largest, (128, 128), (128, 64), (64, 64), (32, 64)]
    # With fewer, processors would be idle: less to read for each is worth more than reading less.
    enough = target.num_processors * 3 // 4
    while sizes[0] != (64, 64) and _num_tiles(sizes[0], mean, num_columns) * num_experts < enough:
        del sizes[0]
    if has_bias and target.name == "sm_80":
        # The bias takes the few registers that such large tiles leave.
        sizes = [(m, n) for m, n in sizes if m * n < 128 * 256]
    return _largest(target, operands, tuple(sizes), is_gated)


def _num_tiles(size: tuple[int, int], num_rows: int, num_columns: int) -> int:
    return -(-num_rows // size[0]) * -(-num_columns // size[1])


def all_gemm_tiles(target: Target, operands: Format, is_gated: bool) -> Iterator[GemmTiles]:
    """Each that `gemm_tiles` can choose, once."""
    columns = [block * target.num_processors for block in (64, 128, 256)]
    chosen = {
        gemm_tiles(
            target,
            operands,
            num_rows=num_rows,
            num_experts=1,
            num_columns=num_columns,
            width=width,
            is_gated=is_gated,
            has_bias=has_bias,
            is_aligned=is_aligned,
        )
        for num_rows in (1, 17, 33, 65, 1024)
        for num_columns in (64, *columns, 1_000_000)
        for width in range(256, 4352, 256)
        for has_bias in (True, False)
        for is_aligned in (True, False)
    }
    yield from sorted(chosen)


def stage_bytes(operands: Format, block_m: int, block_n: int, block_k: int, is_gated: bool) -> int:
    """Shared memory of one step along K: its rows and its weights."""
    weight_rows = block_n * (1 + is_gated)
    if operands == "mxfp4":
        # As they are stored.
        return block_m * block_k * 2 + weight_rows * block_k // 2
    return (block_m + weight_rows) * block_k * {"16-bit": 2, "fp32": 4, "fp8": 1}[operands]


def _fp32_tiles(target: Target, num_rows: int, width: int, is_gated: bool) -> GemmTiles:
    """No tensor cores, and hardly any columns, where it is a router: what there is to do for few
    rows is cut along K, which depends on the width alone.
    """
    size = 64 if num_rows >= 1024 and not is_gated else 32
    tiles = _tiles(target, "fp32", size, size, is_gated)
    return tiles._replace(slices=1 if is_gated else max(1, min(16, width // 256)))


def _largest(
    target: Target, operands: Format, sizes: tuple[tuple[int, int], ...], is_gated: bool
) -> GemmTiles:
    """The first whose sums stay in registers and whose loads can run ahead of its products."""
    most_sums = _most_sums(target, operands, is_gated)
    fitting = [(m, n) for m, n in sizes if m * n * (1 + is_gated) <= most_sums]
    chosen = [_tiles(target, operands, m, n, is_gated) for m, n in fitting]
    enough = 2 if target.is_amd else 3
    return next((tiles for tiles in chosen if tiles.num_stages >= enough), chosen[-1])


def _most_sums(target: Target, operands: Format, is_gated: bool) -> int:
    most_sums = 128 * 256 if operands == "16-bit" else 128 * 128
    if target.name != "sm_90" and (is_gated or operands != "16-bit"):
        # Elsewhere, more than the sums themselves is in registers.
        most_sums //= 2
    # Both operands too, where they are decoded.
    return most_sums // 2 if operands == "fp8" and not target.has_fp8 else most_sums


def _sums_of_4_warps(target: Target, operands: Format) -> int:
    """The most that leave room for the operands, which take more where they are decoded."""
    if operands == "fp8" and not target.has_fp8:
        return 32 * 64
    is_tight = operands == "fp8" or (operands == "mxfp4" and target.name != "sm_90")
    return 64 * 64 if is_tight else 128 * 64


def _tiles(
    target: Target,
    operands: Format,
    block_m: int,
    block_n: int,
    is_gated: bool,
    num_warps: int | None = None,
) -> GemmTiles:
    block_k = {"16-bit": 64, "fp32": 16, "fp8": 128, "mxfp4": 64}[operands]
    if num_warps is None:
        num_sums = block_m * block_n * (1 + is_gated)
        num_warps = 8 if num_sums > _sums_of_4_warps(target, operands) else 4
    step = stage_bytes(operands, block_m, block_n, block_k, is_gated)
    # As weights are multiplied, once more.
    decoded = block_n * (1 + is_gated) * block_k * 2 if operands == "mxfp4" else 0
    is_blackwell = target.name == "sm_100"
    programs = 1 if num_warps == 8 or (is_blackwell and block_m >= 128) else 2
    if target.shared_memory < programs * (_RESERVE + decoded + 3 * step):
        programs = 1
    num_stages = (target.shared_memory // programs - _RESERVE - decoded) // step
    if target.is_amd:
        # What the next step needs waits in registers: one step's operands are in shared memory.
        num_stages = min(2, num_stages + 1)
    return GemmTiles(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        group_m=max(1, 2048 // block_m),
        num_warps=num_warps,
        # With more, Blackwell's assembler puts a few of many registers on the stack.
        num_stages=max(1, min(6 if is_blackwell else _MOST_STAGES, num_stages)),
        programs=programs,
    )
