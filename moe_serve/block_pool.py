"""The free KV blocks, in the order in which they will be reused."""

from __future__ import annotations

from collections.abc import Iterator

_ABSENT = -1


class FreeBlocks:
    """A doubly linked list over the block ids [0, num_blocks); all are free at first.

    The front is reused first, so the list is an LRU: what was freed last goes to the back.
    `pop_front`, `remove` and the pushes are O(1).

    Two lists of ints are the links, closed to a ring by an anchor at index `num_blocks`:

        anchor -> front -> ... -> back -> anchor
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self._anchor = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block_id: int) -> bool:
        return self._next[block_id] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Ids from front to back. The list must not change meanwhile."""
        block_id = self._next[self._anchor]
        while block_id != self._anchor:
            yield block_id
            block_id = self._next[block_id]

    def pop_front(self) -> int:
        """Take the block to reuse next. The list must not be empty."""
        block_id = self._next[self._anchor]
        assert block_id != self._anchor, "no free block"
        self.remove(block_id)
        return block_id

    def remove(self, block_id: int) -> None:
        """Take this free block out, wherever it stands."""
        assert block_id in self, f"block {block_id} is not free"
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._next[block_id] = self._previous[block_id] = _ABSENT
        self._num_free -= 1

    def push_front(self, block_id: int) -> None:
        """Free a block whose content is worth nothing: it is reused first."""
        self._insert_after(self._anchor, block_id)

    def push_back(self, block_id: int) -> None:
        """Free a block whose content may be wanted again: it is reused last."""
        self._insert_after(self._previous[self._anchor], block_id)

    def _insert_after(self, before: int, block_id: int) -> None:
        assert block_id not in self, f"block {block_id} is free already"
        after = self._next[before]
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id] = before
        self._next[block_id] = after
        self._num_free += 1

    def check_integrity(self) -> None:
        """Assert that links agree in both directions and that the length is right."""
        num_seen, before = 0, self._anchor
        for block_id in self:
            assert self._previous[block_id] == before, f"block {block_id} is linked wrongly"
            num_seen, before = num_seen + 1, block_id
            assert num_seen <= self._num_free, "the free list is longer than its count"
        assert num_seen == self._num_free, f"{num_seen} blocks linked, {self._num_free} counted"
