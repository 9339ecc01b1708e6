"""The tensors of a layer's experts: one a matrix of each expert, or stacks of all of them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from moe_serve.models.names import CheckpointNames
from moe_serve.models.shard import ModelShard
from moe_serve.models.slots import BlockNames, Box, Shape, Slot, Source
from moe_serve.models.spec import MoESpec
from moe_serve.parallel.shard import Span

# Shapes: E experts, D model, F expert inner, G = 2F (gate rows first).


def expert_sources(
    spec: MoESpec,
    size: int,
    block: BlockNames,
    names: CheckpointNames,
    shapes: Mapping[str, Shape],
    shard: ModelShard,
    moe_index: int,
) -> Iterator[Source]:
    """Each of the two parameters comes from one stacked tensor, or expert by expert."""
    inner, bank = spec.inner_size, shard.experts(moe_index, spec.num_experts)
    gate_up = _Stack(
        block=block,
        parameter=f"{block.ours}experts.gate_up_EGD",
        name="gate_up_proj",
        parts=(names.expert_gate, names.expert_up),
        shape=(spec.num_experts, 2 * inner, size),
        own_rows=shard.expert_inner(inner),
        own_columns=Span(0, size),
        bank=bank,
    )
    down = _Stack(
        block=block,
        parameter=f"{block.ours}experts.down_EDF",
        name="down_proj",
        parts=(names.expert_down,),
        shape=(spec.num_experts, size, inner),
        own_rows=Span(0, size),
        own_columns=shard.expert_down_columns(inner),
        bank=bank,
    )
    stacks = (gate_up, down)
    directions = {stack.is_transposed(shapes) for stack in stacks} - {None}
    for stack in stacks:
        if stack.find(shapes) is None:
            yield from stack.singles()
        else:
            own = stack.is_transposed(shapes)
            # A square tensor does not show its direction: it goes by the other one of its layer.
            yield stack.whole(directions == {True} if own is None else own)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """A parameter of all experts, [E, rows, columns]; `parts`: the matrices in it, row after row.

    This rank takes `own_rows` and `own_columns` of each matrix, of the experts in `bank`.
    """

    block: BlockNames
    parameter: str
    name: str
    parts: tuple[str, ...]
    shape: tuple[int, int, int]
    own_rows: Span
    own_columns: Span
    bank: tuple[int, ...]

    def find(self, shapes: Mapping[str, Shape]) -> Shape | None:
        """The shape of the stacked tensor, where the checkpoint has one."""
        found = (shapes[name] for name in self._names if name in shapes)
        return next(found, None)

    def is_transposed(self, shapes: Mapping[str, Shape]) -> bool | None:
        """None where there is no such tensor or its shape does not tell."""
        found = self.find(shapes)
        if found is None or self.shape[1] == self.shape[2]:
            return None
        return found == self._transposed

    def whole(self, is_transposed: bool) -> Source:
        """All experts in one tensor."""
        slots = []
        for experts, indices in _runs(self.bank):
            for part in range(len(self.parts)):
                rows = self.own_rows.shifted(part * self._part_rows)
                box = (self.own_columns, rows) if is_transposed else (rows, self.own_columns)
                slots.append(self._slot((experts, *box), indices, part, is_transposed))
        shape = self._transposed if is_transposed else self.shape
        return Source(names=self._names, shape=shape, slots=tuple(slots))

    def singles(self) -> Iterator[Source]:
        """A tensor for each matrix of each expert."""
        box = (self.own_rows, self.own_columns)
        index_of = {expert: index for index, expert in enumerate(self.bank)}
        for expert in range(self.shape[0]):
            for part, name in enumerate(self.parts):
                slots: tuple[Slot, ...] = ()
                if (index := index_of.get(expert)) is not None:
                    slots = (self._slot(box, Span(index, index + 1), part),)
                yield Source(
                    names=self.block.all(f"experts.{expert}.{name}.weight"),
                    shape=(self._part_rows, self.shape[2]),
                    slots=slots,
                )

    def _slot(self, box: Box, indices: Span, part: int, is_transposed: bool = False) -> Slot:
        """`box`: what fills matrix `part` of the experts at `indices` of the bank."""
        size = self.own_rows.size
        return Slot(
            parameter=self.parameter,
            part=box,
            place=(indices, Span(part * size, (part + 1) * size)),
            is_transposed=is_transposed,
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return self.block.all(f"experts.{self.name}")

    @property
    def _part_rows(self) -> int:
        return self.shape[1] // len(self.parts)

    @property
    def _transposed(self) -> tuple[int, int, int]:
        num_experts, rows, columns = self.shape
        return num_experts, columns, rows


def _runs(bank: Sequence[int]) -> Iterator[tuple[Span, Span]]:
    """(neighbouring experts, their indices in the bank), so that each run is one read.

    Example: bank 2 3 4 7 -> ([2, 5), [0, 3)), ([7, 8), [3, 4)).
    """
    gaps = [i + 1 for i, (a, b) in enumerate(pairwise(bank)) if b != a + 1]
    for first, stop in pairwise([0, *gaps, len(bank)]):
        if stop > first:
            yield Span(bank[first], bank[first] + stop - first), Span(first, stop)
