"""What the rows of a product in paged attention are, and where a tile's keys and values lie."""

from __future__ import annotations

from moe_serve.kernels.jit import tl, triton


@triton.jit
def load_block(item_ptr):
    """(sequence, first row of T, tokens, position of the first)."""
    return tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2), tl.load(item_ptr + 3)


@triton.jit
def place_rows(head, count, GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """What each row of a product is: (token of the block, query head, is it there)."""
    HEADS: tl.constexpr = min(GROUP, ROWS)
    rows = tl.arange(0, ROWS)
    in_group = head % CHUNKS * HEADS + rows % HEADS
    tokens = rows // HEADS
    valid = (tokens < count) & (in_group < GROUP)
    # Rows that are not there look where the last one does.
    return tl.minimum(tokens, count - 1), head // CHUNKS * GROUP + in_group, valid


@triton.jit
def load_tile(
    start, low, high, table_ptr, k_ptr, v_ptr, block_stride, slot_stride,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys and values of the positions from `start` on; zero outside low ... high - 1."""
    lanes = tl.arange(0, KEYS)
    ahead = start + lanes
    blocks = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < high, other=0).to(tl.int64)
    # Not written with `ahead`: the table is read some tiles before the rest, and what both share
    # would be kept in registers all that time.
    inside = (lanes >= low - start) & (lanes < high - start)
    slots = blocks * block_stride + (start % BLOCK_SIZE + lanes) % BLOCK_SIZE * slot_stride
    columns = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
    offsets = slots[:, None] + columns[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    return k, tl.load(v_ptr + offsets, mask=mask, other=0.0)
