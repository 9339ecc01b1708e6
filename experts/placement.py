"""Which rank holds which experts. Pure."""

from __future__ import annotations

import dataclasses

from moe_serve.parallel.shard import split


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """`experts[rank]`: the logical experts of that rank, in the order of its bank.

    Each logical expert is on exactly one rank; a rank may have none.
    """

    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        placed = sorted(expert for own in self.experts for expert in own)
        assert placed == list(range(len(placed))), "each expert must be placed once"

    @classmethod
    def make(cls, num_experts: int, num_ranks: int, strategy: str) -> Placement:
        """linear: runs of neighbours; round_robin: expert e on rank e % ranks. Within one of even.

        Example, 8 experts on 3 ranks, linear: 0 1 2 | 3 4 5 | 6 7.
        """
        if strategy == "round_robin":
            ranks = [tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)]
        else:
            ranks = [
                tuple(range(*split(num_experts, rank, num_ranks))) for rank in range(num_ranks)
            ]
        return cls(tuple(ranks))

    @property
    def num_experts(self) -> int:
        return sum(len(own) for own in self.experts)

    @property
    def num_ranks(self) -> int:
        return len(self.experts)

    @property
    def rank_of(self) -> list[int]:
        """By logical expert: its rank."""
        return [rank for _, rank, _ in self._rows()]

    @property
    def index_of(self) -> list[int]:
        """By logical expert: its index in the bank of its rank."""
        return [index for _, _, index in self._rows()]

    def _rows(self) -> list[tuple[int, int, int]]:
        """(logical expert, rank, index in that rank's bank), by expert."""
        return sorted(
            (expert, rank, index)
            for rank, own in enumerate(self.experts)
            for index, expert in enumerate(own)
        )
