"""The tensors to be written, one a matrix as the hub's checkpoints have them. Pure.

A source may hold all experts of a layer in one tensor, as transformers trains them, and may name
blocks in another way: both come to the same parameters of ours, by which the two are matched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from moe_serve.models.names import CheckpointNames
from moe_serve.models.slots import Box, Shape, Slot, Source
from moe_serve.models.sources import decoder_sources
from moe_serve.models.spec import DecoderSpec
from moe_serve.parallel.shard import Span

# Where the hub's checkpoints have them: after all layers.
_LAST = ("model.norm.weight", "lm_head.weight")

# (parameter, place in it) -> the tensor of the source that fills it, and with which part.
_Filled = dict[tuple[str, Box], tuple[str, Slot]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor to be written: a part of the tensor `source`, perhaps turned, in this shape."""

    name: str
    shape: Shape
    source: str
    part: Box
    is_transposed: bool


def plan_outputs(
    spec: DecoderSpec, names: CheckpointNames, plan: Mapping[str, Source]
) -> list[Output]:
    """Of a whole model. `plan`: what fills each parameter, by the source's own names."""
    wanted = decoder_sources(spec, names, {})
    singles, stacks = _filled(plan)
    outputs = [_output(source, singles, stacks) for source in wanted]
    return sorted(outputs, key=lambda output: output.name in _LAST)


def _filled(plan: Mapping[str, Source]) -> tuple[_Filled, _Filled]:
    """By whole place, and for tensors of all experts by the rows of each expert."""
    singles: _Filled = {}
    stacks: _Filled = {}
    for name, source in plan.items():
        for slot in source.slots:
            is_stack = len(slot.part) == 3
            place = slot.place[1:] if is_stack else slot.place
            (stacks if is_stack else singles)[slot.parameter, place] = name, slot
    return singles, stacks


def _output(wanted: Source, singles: _Filled, stacks: _Filled) -> Output:
    (slot,) = wanted.slots
    single = singles.get((slot.parameter, slot.place))
    if single is not None:
        name, found = single
        part = found.part
    else:
        expert, *rows = slot.place
        name, found = stacks[slot.parameter, tuple(rows)]
        experts, *box = found.part
        first = experts.start + expert.start - found.place[0].start
        part = (Span(first, first + 1), *box)
    return Output(
        name=wanted.names[0],
        shape=wanted.shape,
        source=name,
        part=part,
        is_transposed=found.is_transposed,
    )


def parts_by_source(outputs: Iterable[Output]) -> dict[str, list[Output]]:
    """Tensor of the source -> the outputs that are parts of it, in order."""
    parts: dict[str, list[Output]] = {}
    for output in outputs:
        parts.setdefault(output.source, []).append(output)
    return parts
