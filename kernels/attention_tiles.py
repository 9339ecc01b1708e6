"""Tile sizes of paged attention: plain numbers in and out."""

from __future__ import annotations

from typing import NamedTuple

from moe_serve.kernels.attention_work import Cut
from moe_serve.kernels.targets import Target

# Keys that one program attends to before it starts afresh and merges: fixed, since a row's bits
# depend on it. Long enough that merging costs little, short enough that a few sequences fill a GPU.
SPLIT = 512


# Heads of up to so many columns have tiles of their own; padded to a power of two in kernels.
HEAD_DIMS = (64, 128, 256)


class AttentionTiles(NamedTuple):
    """- `rows`: of one product, query tokens times heads that share a kv head.
    - `keys`: of one product; divides `split`.
    - `programs`: how many share a processor.
    """

    rows: int
    keys: int
    split: int
    num_warps: int
    num_stages: int
    programs: int

    def cut(self, group: int) -> Cut:
        """`group`: query heads of a kv head."""
        return Cut(query_tokens=max(1, self.rows // group), split=self.split)


def attention_tiles(target: Target, head_dim: int, size: int) -> AttentionTiles:
    """`size`: bytes of a number. Never by the batch: see paged_attention."""
    if target.name == "interpreter":
        # Small, so that small tests meet several splits and tiles.
        return AttentionTiles(16, 32, 64, num_warps=4, num_stages=1, programs=1)
    wide = head_dim > 128
    if size == 4:
        # By what spills no register: the products are sums of single numbers here.
        warps = 8 if 64 < head_dim <= 128 and not target.is_amd else 4
        return AttentionTiles(16, 32, SPLIT, num_warps=warps, num_stages=1, programs=2)
    if target.is_amd:
        return AttentionTiles(64, 32 if wide else 64, SPLIT, 4, num_stages=1, programs=2)
    # Five stages: the table of blocks is read two tiles ahead, and keys and values two more.
    if target.has_wgmma:
        if wide:
            return AttentionTiles(64, 32, SPLIT, num_warps=8, num_stages=5, programs=1)
        return AttentionTiles(64, 64, SPLIT, num_warps=4, num_stages=5, programs=2)
    if wide:
        return AttentionTiles(32, 32, SPLIT, num_warps=8, num_stages=5, programs=1)
    warps = 4 if head_dim <= 64 else 8
    return AttentionTiles(64, 64, SPLIT, num_warps=warps, num_stages=5, programs=1)
