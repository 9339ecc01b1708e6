"""Tiles of the kernels that work on rows: pure, from sizes alone.

The order of a sum inside a tile follows from the tile's shape and its warps. So no tile here
depends on how many rows there are: a row has the same bits in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

# Enough for four warps to move 16 bytes a thread.
_ELEMENTS = 1024
# Items that are worth comparing each with all others.
AT_ONCE = 8192


class RowTiles(NamedTuple):
    """One program's part: `rows` of up to `columns` columns each, both powers of two."""

    rows: int
    columns: int
    num_warps: int


class PermuteTiles(NamedTuple):
    """`items` that a program places, looking at `chunk` others at a time; `blocks` of items whose
    experts are counted apart and added up, 1: every program looks at all items.
    """

    items: int
    chunk: int
    experts: int
    blocks: int


def power_of_two(size: int) -> int:
    """The least one that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def whole_row_tiles(size: int) -> RowTiles:
    """For a sum over rows of `size` columns: a row is never cut."""
    columns = power_of_two(size)
    return RowTiles(max(1, _ELEMENTS // columns), columns, min(16, max(4, columns // 512)))


def elementwise_tiles(size: int) -> RowTiles:
    """For what needs no other element of its row: long rows are cut."""
    columns = min(_ELEMENTS, power_of_two(size))
    return RowTiles(_ELEMENTS // columns, columns, 4)


def router_tiles(columns: int) -> RowTiles:
    """`columns`: experts and what pads their groups. One warp: a maximum needs no barrier."""
    return RowTiles(min(16, max(1, 512 // columns)), columns, 1 if columns <= 512 else 4)


def permute_tiles(num_items: int, num_experts: int) -> PermuteTiles:
    """In one launch where there are few: its time grows with the square of their number."""
    experts = min(64, power_of_two(num_experts))
    if num_items <= AT_ONCE:
        return PermuteTiles(64, 64, experts, 1)
    return PermuteTiles(256, 32, experts, -(-num_items // 256))


def scan_tiles(size: int) -> RowTiles:
    """For programs that pass over a long row block by block."""
    return RowTiles(1, min(2048, power_of_two(size)), 8 if size < 8192 else 16)
