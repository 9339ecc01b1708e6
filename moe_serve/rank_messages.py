"""What rank 0 and the other ranks of an engine tell each other, beside tensors.

To a rank: `FitPool` and `MakePool` once, then `StepMessage` (of `step_codec`), `ReadLoad`,
`ReadCommunication`, `ForgetWarmUp` and what moves experts, in any order, `Shutdown` at the end.
From a rank: `RankHello`, `LoadProgress`, `RankLoaded`, `PoolFits`, `RankReady`, then `LaneResult` a
step from a lane's leader, and answers to what was asked; or `RankFailed` and the end.

Experts move in parts: `StageExperts`, `ReadStaging` until all ranks are done, then `SwitchExperts`
between two steps, or `DropStaged`, and all is as it was.
"""

from __future__ import annotations

import dataclasses

from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.messages import Shutdown
from moe_serve.parallel.comm_log import GroupCommunication
from moe_serve.step import ChunkResult
from moe_serve.step_codec import StepMessage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """The rank has connected."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Bytes that the rank has read of those it needs."""

    bytes_read: int
    bytes_needed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLoaded:
    """The weights are there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitPool:
    """All ranks have their weights: find out together how many KV blocks fit beside them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolFits:
    """That many KV blocks fit on the rank."""

    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MakePool:
    """The least that fits on any rank: blocks have the same ids everywhere in a lane."""

    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """The rank waits for steps. `expert_address`: where others get weights of its experts from;
    empty where none move.
    """

    expert_address: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneFailure:
    """Why one request cannot go on; `is_client_fault`: its own bias and masks leave no token."""

    request_id: str
    message: str
    is_client_fault: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneResult:
    """One result a chunk of the lane, in order."""

    results: list[ChunkResult]
    failures: list[LaneFailure]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadLoad:
    """Answered with `RankLoad`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What this rank has counted: `LoadCounts.to_bytes`, since it is long and comes often."""

    counts: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadCommunication:
    """Answered with `RankCommunication`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankCommunication:
    """What this rank has moved, by group."""

    groups: list[GroupCommunication]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForgetWarmUp:
    """Wipe what the warm-up left behind, in that many blocks."""

    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAddresses:
    """By rank, what `RankReady` told."""

    addresses: list[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageExperts:
    """Fetch these experts beside those in use, within `timeout` seconds. Answered by nothing."""

    copies: list[ExpertCopy]
    timeout: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadStaging:
    """Answered with `Staging`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """How far a rank is: done, at work, or why it cannot. `num_bytes` came from other ranks."""

    is_done: bool
    num_bytes: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwitchExperts:
    """From the next step on: what was staged is in use. `layers`: by MoE layer, the experts of
    each rank in all its slots.
    """

    layers: dict[int, list[list[int]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropStaged:
    """Forget what was staged; stop staging."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadChecksums:
    """Answered with `Checksums`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """By MoE layer and slot of the rank: of the weights that are in use."""

    checksums: list[list[int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """The rank is about to end. `is_config` tells a user's mistake from our own fault."""

    message: str
    is_config: bool


ToRank = (
    FitPool
    | MakePool
    | ExpertAddresses
    | StepMessage
    | ReadLoad
    | ReadCommunication
    | ForgetWarmUp
    | StageExperts
    | ReadStaging
    | SwitchExperts
    | DropStaged
    | ReadChecksums
    | Shutdown
)
FromRank = (
    RankHello
    | LoadProgress
    | RankLoaded
    | PoolFits
    | RankReady
    | LaneResult
    | RankLoad
    | RankCommunication
    | Staging
    | Checksums
    | RankFailed
)
