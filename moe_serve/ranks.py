"""What the layers of a model know about the ranks they run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from moe_serve.config import All2AllBackend
from moe_serve.models.shard import WHOLE_MODEL, ModelShard
from moe_serve.parallel.group import SOLO, RankGroup
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.slices import TokenSlices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """`lane`: the ranks that share this one's tokens. `experts`: those that its experts are spread
    over, each whole: all of them with expert parallelism, else this one alone.
    """

    shard: ModelShard = WHOLE_MODEL
    lane: RankGroup = SOLO
    experts: RankGroup = SOLO
    all2all_backend: All2AllBackend = "auto"

    @property
    def layout(self) -> RankLayout:
        return self.shard.layout

    def close(self) -> None:
        """Give up what the groups hold. Does not wait for the others."""
        self.lane.close()
        self.experts.close()

    def step(
        self,
        num_tokens_of_lanes: Sequence[int],
        phases_T: Tensor | None = None,
        num_valid_1: Tensor | None = None,
        routes_LtK: Tensor | None = None,
    ) -> StepTokens:
        """`phases_T`: of all tokens of this lane."""
        layout = self.layout
        slices = TokenSlices(self.lane, num_tokens_of_lanes[layout.lane])
        most = max(num_tokens_of_lanes) if layout.expert_parallel else slices.num_tokens
        return StepTokens(
            slices,
            -(-most // layout.tensor_size),
            None if phases_T is None else slices.own(phases_T),
            num_valid_1,
            routes_LtK,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StepTokens:
    """`slices`: how this lane's tokens lie on its ranks. `capacity`: the longest slice of any rank
    that meets this one's experts; every rank knows it. `phases_T` of the own slice, and
    `num_valid_1`: see `StepContext`. `routes_LtK`: see `RouteCapture`; None: nobody wants them.
    """

    slices: TokenSlices
    capacity: int
    phases_T: Tensor | None = None
    num_valid_1: Tensor | None = None
    routes_LtK: Tensor | None = None


SINGLE_RANK = Ranks()
