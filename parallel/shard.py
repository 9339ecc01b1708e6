"""Which part of a weight a rank holds. Pure: sizes in, ranges out."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Span(NamedTuple):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> Span:
        """The same range, counted in parts: of each thing there are `factor`."""
        return Span(self.start * factor, self.stop * factor)

    def shifted(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)


def split(size: int, rank: int, num_ranks: int) -> Span:
    """This rank's part of `size` things, in order; parts differ by one at most, larger ones first.

    Example: 8 over 3 ranks: [0, 3) [3, 6) [6, 8).
    """
    least, num_larger = divmod(size, num_ranks)
    start = rank * least + min(rank, num_larger)
    return Span(start, start + least + (rank < num_larger))


@dataclasses.dataclass(frozen=True, slots=True)
class HeadShard:
    """Attention heads of one rank: its query heads, and the KV heads that these look at."""

    heads: Span
    kv_heads: Span


def can_split_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    """Whether every rank gets as many heads, and whole KV heads, of its own or a copy of one."""
    return num_heads % num_ranks == 0 and (
        num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
    )


def split_heads(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> HeadShard:
    """Query heads in order. With fewer KV heads than ranks, neighbours hold copies of one.

    Example: 8 heads, 2 KV heads, 4 ranks: rank 1 has query heads 2 and 3, and KV head 0.
    """
    assert can_split_heads(num_heads, num_kv_heads, num_ranks)
    heads = split(num_heads, rank, num_ranks)
    if num_kv_heads % num_ranks == 0:
        return HeadShard(heads, split(num_kv_heads, rank, num_ranks))
    kv_head = rank // (num_ranks // num_kv_heads)
    return HeadShard(heads, Span(kv_head, kv_head + 1))
