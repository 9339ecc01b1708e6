"""How the ranks of one engine are arranged. Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """`data_size` lanes of `tensor_size` ranks each, and this rank's place among them.

        rank = lane * tensor_size + lane_rank

    - `tensor_size`: ranks over which a lane's attention is split; they share its tokens.
    - `data_size`: lanes. Each has its own requests and its own KV pool.
    - `expert_parallel`: whole experts are spread over all ranks. Otherwise each lane holds all of
      them, split over its ranks along their inner dimension.
    - `deterministic`: no sum crosses ranks, so results do not depend on `tensor_size` either.
    """

    rank: int = 0
    tensor_size: int = 1
    data_size: int = 1
    expert_parallel: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        assert self.tensor_size > 0 and self.data_size > 0 and 0 <= self.rank < self.world_size

    @property
    def world_size(self) -> int:
        return self.tensor_size * self.data_size

    @property
    def lane(self) -> int:
        return self.rank // self.tensor_size

    @property
    def lane_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def is_lane_leader(self) -> bool:
        """The rank that samples for its lane and answers for it."""
        return self.lane_rank == 0

    @property
    def expert_size(self) -> int:
        """Ranks over which whole experts are spread."""
        return self.world_size if self.expert_parallel else 1

    def lane_ranks(self, lane: int) -> range:
        """The ranks of a lane, leader first."""
        return range(lane * self.tensor_size, (lane + 1) * self.tensor_size)


SINGLE_RANK = RankLayout()
