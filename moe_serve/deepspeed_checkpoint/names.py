"""What `deepspeed.moe.layer.MoE` calls its tensors, in the names of a family.

    <block>.deepspeed_moe.gate.wg.weight    ->  <block>.gate.weight
    <block>.deepspeed_moe.experts.deepspeed_experts.<e>.<m>.weight
                                            ->  <block>.experts.<e>.<n>.weight

<block> is where the family has its MoE block (`model.layers.<l>.mlp`, or for Mixtral also
`.block_sparse_moe`), or an attribute of what stands there (`model.layers.<l>.mlp.moe`): that one
more name is left out. <m> is either spelling of a matrix and <n> the family's own:

    gate    w1   gate_proj          up    w3   up_proj          down    w2   down_proj

All other names stay as they are. What the layer may hold besides (a residual expert `mlp` with its
`coefficient`, biases) is in no model that is served here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from moe_serve.errors import CheckpointError
from moe_serve.models.names import CheckpointNames

_MOE = re.compile(r"(?P<block>.+)\.deepspeed_moe\.(?P<rest>.+)")
_EXPERT = re.compile(r"experts\.deepspeed_experts\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")
_ROUTER = "gate.wg.weight"
_KINDS = {
    "w1": "gate", "gate_proj": "gate",
    "w3": "up", "up_proj": "up",
    "w2": "down", "down_proj": "down",
}  # fmt: skip


def expert_of(name: str) -> int | None:
    """Whose tensor it is; None where it is of no expert of such a layer."""
    found = _MOE.fullmatch(name)
    expert = _EXPERT.fullmatch(found["rest"]) if found else None
    return int(expert["expert"]) if expert else None


def moe_blocks(names: Iterable[str]) -> set[str]:
    """The modules of the class `MoE`."""
    return {found["block"] for found in map(_MOE.fullmatch, names) if found}


def family_name(name: str, family: CheckpointNames, blocks: set[str], file: Path) -> str:
    """Raises `CheckpointError` for a tensor that the family has no place for."""
    found = _MOE.fullmatch(name)
    if found is None:
        block = next((one for one in blocks if name.startswith(f"{one}.")), None)
        if block is None:
            return name
        raise CheckpointError(
            f"{file}: tensor {name} is of a residual MoE layer (use_residual) or another addition "
            f"to {block}, which no model served here has; expected {block}.deepspeed_moe alone"
        )
    prefixes = "|".join(map(re.escape, family.moe_prefixes))
    place = re.fullmatch(
        rf"(?P<block>model\.layers\.\d+\.(?:{prefixes}))(?:\.\w+)?", found["block"]
    )
    if place is None:
        raise CheckpointError(
            f"{file}: tensor {name} is of a MoE layer where the family has none; expected it at "
            f"model.layers.<l>.{' or '.join(family.moe_prefixes)}"
        )
    if found["rest"] == _ROUTER:
        return f"{place['block']}.gate.weight"
    expert = _EXPERT.fullmatch(found["rest"])
    if expert is None or expert["matrix"] not in _KINDS:
        raise CheckpointError(
            f"{file}: tensor {name} has no place in the model; expected {_ROUTER} and of each "
            "expert w1, w2, w3 or gate_proj, up_proj, down_proj, without bias"
        )
    own = {
        "gate": family.expert_gate, "up": family.expert_up, "down": family.expert_down
    }[_KINDS[expert["matrix"]]]  # fmt: skip
    return f"{place['block']}.experts.{expert['expert']}.{own}.weight"
