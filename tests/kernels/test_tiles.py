"""Tiles of products fit their GPU and keep the order of the sum over K."""

from __future__ import annotations

import itertools

import pytest

from moe_serve.kernels.targets import TARGETS, Target
from moe_serve.kernels.tiles import FORMATS, Format, all_gemm_tiles, gemm_tiles, stage_bytes

CONSUMER = Target(name="sm_80", shared_memory=101_376, num_processors=82)
GPUS = (*TARGETS.values(), CONSUMER)
ROWS = (1, 7, 17, 64, 129, 300, 4096, 100_000)


@pytest.mark.parametrize("operands", FORMATS)
@pytest.mark.parametrize("target", GPUS, ids=lambda target: f"{target.name}-{target.shared_memory}")
def test_every_choice_fits(target: Target, operands: Format) -> None:
    for is_gated in (False, True):
        for tiles in all_gemm_tiles(target, operands, is_gated):
            sizes = tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps
            assert all(size & (size - 1) == 0 for size in sizes), tiles
            # Of a box that the memory engine copies.
            assert max(tiles.block_m, tiles.block_n, tiles.block_k) <= 256
            step = stage_bytes(operands, *sizes[:3], is_gated)
            in_memory = 1 if target.is_amd else tiles.num_stages
            assert step * in_memory * tiles.programs <= target.shared_memory, tiles
            assert tiles.num_stages >= 2, "loads wait for products"
            # Sums alone, of 255 registers a thread.
            sums = tiles.block_m * tiles.block_n * (1 + is_gated)
            assert sums / (tiles.num_warps * target.warp_size) <= 128, tiles


@pytest.mark.parametrize("operands", FORMATS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_rows_do_not_change_steps_along_k_or_the_kind_of_product(
    target: Target, operands: Format
) -> None:
    for is_gated, width in itertools.product((False, True), (50, 2048, 7168)):
        every = [
            gemm_tiles(
                target,
                operands,
                num_rows=num_rows,
                num_experts=num_experts,
                num_columns=768,
                width=width,
                is_gated=is_gated,
            )
            for num_rows, num_experts in itertools.product(ROWS, (1, 8, 256))
        ]
        assert len({(tiles.block_k, tiles.slices) for tiles in every}) == 1
        if target.has_wgmma and operands != "fp32":
            # A wgmma takes 64 rows of its first operand, the weights, for four warps.
            assert min(tiles.block_n for tiles in every) >= 64


@pytest.mark.parametrize("operands", FORMATS)
@pytest.mark.parametrize("target", GPUS, ids=lambda target: f"{target.name}-{target.shared_memory}")
def test_everything_that_can_be_chosen_is_listed(target: Target, operands: Format) -> None:
    for is_gated, is_aligned in itertools.product((False, True), repeat=2):
        listed = set(all_gemm_tiles(target, operands, is_gated))
        for rows, experts, columns, width in itertools.product(
            ROWS, (1, 8, 256), (1, 768, 5120, 18_432, 32_768), (50, 7168)
        ):
            chosen = gemm_tiles(
                target,
                operands,
                num_rows=rows,
                num_experts=experts,
                num_columns=columns,
                width=width,
                is_gated=is_gated,
                is_aligned=is_aligned,
            )
            assert chosen in listed


def test_few_rows_take_one_tile_and_many_take_large_ones() -> None:
    def block_m(rows: int, experts: int) -> int:
        return gemm_tiles(
            TARGETS["sm_90"],
            "16-bit",
            num_rows=rows,
            num_experts=experts,
            num_columns=4096,
            width=4096,
            is_gated=False,
        ).block_m

    assert [block_m(rows, 1) for rows in (1, 16, 17, 64)] == [16, 16, 32, 64]
    # Experts are not used evenly.
    assert [block_m(rows, 8) for rows in (2, 64, 65, 256)] == [16, 16, 32, 64]
    assert [block_m(rows, 8) for rows in (1024, 8192)] == [128, 256]


@pytest.mark.parametrize("num_rows", [17, 40, 65, 128, 256, 1024, 4096])
def test_no_product_leaves_most_processors_idle(num_rows: int) -> None:
    target, num_columns = TARGETS["sm_90"], 5120
    tiles = gemm_tiles(
        target,
        "16-bit",
        num_rows=num_rows,
        num_experts=1,
        num_columns=num_columns,
        width=4096,
        is_gated=False,
    )
    num_tiles = -(-num_rows // tiles.block_m) * -(-num_columns // tiles.block_n)
    assert num_tiles > target.num_processors / 2
