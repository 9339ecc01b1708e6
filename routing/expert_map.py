"""Where the experts are, as the dispatchers of one rank need it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

# Shapes: E logical experts.

# Expert ids travel in two bytes.
_MOST_EXPERTS = 2**15


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertMap:
    """By logical expert: its rank, and its index in that rank's bank; int64 on the model's device.

    Any placement will do: ranks may hold different numbers of experts, or none. `is_in_order`: the
    index of each expert is its number.
    """

    rank_of_E: Tensor
    index_of_E: Tensor
    num_local: tuple[int, ...]
    is_in_order: bool

    @classmethod
    def make(
        cls,
        rank_of: Sequence[int],
        index_of: Sequence[int],
        num_ranks: int,
        device: torch.device | str = "cpu",
    ) -> ExpertMap:
        assert len(rank_of) == len(index_of) <= _MOST_EXPERTS and max(rank_of) < num_ranks
        return cls(
            torch.tensor(rank_of, dtype=torch.int64, device=device),
            torch.tensor(index_of, dtype=torch.int64, device=device),
            tuple(list(rank_of).count(rank) for rank in range(num_ranks)),
            list(index_of) == list(range(len(index_of))),
        )

    @property
    def most_local(self) -> int:
        """Experts of the rank that has most."""
        return max(self.num_local)
