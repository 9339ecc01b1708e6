"""Which architectures can be served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from moe_serve.errors import CheckpointError
from moe_serve.models import mixtral, olmoe, qwen2_moe, qwen3_moe
from moe_serve.models.names import CheckpointNames
from moe_serve.models.reading import HFConfig
from moe_serve.models.spec import DecoderSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read one architecture's config and what its tensors are called."""

    spec: Callable[[HFConfig], DecoderSpec]
    names: CheckpointNames


FAMILIES = {
    "MixtralForCausalLM": Family(spec=mixtral.spec, names=mixtral.NAMES),
    "OlmoeForCausalLM": Family(spec=olmoe.spec, names=olmoe.NAMES),
    "Qwen2MoeForCausalLM": Family(spec=qwen2_moe.spec, names=qwen2_moe.NAMES),
    "Qwen3MoeForCausalLM": Family(spec=qwen3_moe.spec, names=qwen3_moe.NAMES),
}


def find_family(architectures: Sequence[str] | None) -> Family:
    """The family of `architectures` in a config.json. Raises `CheckpointError` if none is known."""
    names = list(architectures or ())
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    raise CheckpointError(
        f"config.json: architectures {names} cannot be served; known: {', '.join(FAMILIES)}"
    )
