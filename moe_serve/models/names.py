"""What a checkpoint calls its tensors."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """The names in which families differ; `models.slots` holds those that all share.

    `moe_prefixes`: where the MoE block may hang in a layer; the first is the usual one.
    The expert names are of one expert's matrices, in `experts.<e>.<name>.weight`.
    """

    moe_prefixes: tuple[str, ...] = ("mlp",)
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
