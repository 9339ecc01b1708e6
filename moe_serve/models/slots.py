"""Where each tensor of a checkpoint goes. Pure: names and shapes in, places out.

Our parameters are fused (q, k, v in one matrix; gate and up in one; experts stacked), so one
parameter is filled from several tensors, each into its own run of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from moe_serve.models.names import CheckpointNames
from moe_serve.models.spec import AttentionSpec, DecoderSpec, DenseMLPSpec, MoESpec

# Shapes: E experts, D model, F expert inner, G = 2F (gate rows first).

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Rows of one parameter, and the tensor that fills them.

    `first_row` counts rows of the parameter seen as a matrix: all dimensions but the last are one
    (a vector is a matrix with one column). `names`: what the tensor may be called, usual name
    first. `shape`: what it must have in the checkpoint. `is_transposed`: its last two dimensions
    are swapped there.
    """

    parameter: str
    names: tuple[str, ...]
    shape: Shape
    first_row: int = 0
    is_transposed: bool = False


def decoder_slots(
    spec: DecoderSpec, names: CheckpointNames, shapes: Mapping[str, Shape]
) -> list[Slot]:
    """All slots of a decoder. `shapes`: what the checkpoint holds; it decides the expert layout."""
    table = (spec.vocab_size, spec.hidden_size)
    slots = [
        _whole("embedding.weight_VD", "model.embed_tokens.weight", table),
        _whole("norm.weight_D", "model.norm.weight", (spec.hidden_size,)),
    ]
    if not spec.tie_embeddings:
        slots.append(_whole("head.weight_ND", "lm_head.weight", table))
    size = spec.hidden_size
    for index, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        for norm, name in norms.items():
            slots.append(_whole(f"{ours}{norm}.weight_D", f"{theirs}{name}.weight", (size,)))
        slots += _attention(layer.attention, size, f"{ours}attention.", f"{theirs}self_attn.")
        if isinstance(layer.mlp, MoESpec):
            blocks = tuple(f"{theirs}{prefix}." for prefix in names.moe_prefixes)
            slots += _moe(layer.mlp, size, f"{ours}mlp.", blocks, names, shapes)
        else:
            slots += _dense(layer.mlp, size, f"{ours}mlp.", (f"{theirs}mlp.",))
    return slots


def _whole(parameter: str, name: str, shape: Shape) -> Slot:
    return Slot(parameter=parameter, names=(name,), shape=shape)


def _attention(spec: AttentionSpec, size: int, ours: str, theirs: str) -> Iterator[Slot]:
    first_row = 0
    for part, rows in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)):
        kinds: list[tuple[str, str, Shape]] = [("weight", "weight_ND", (rows, size))]
        if spec.has_qkv_bias:
            kinds.append(("bias", "bias_N", (rows,)))
        for kind, parameter, shape in kinds:
            yield Slot(
                parameter=f"{ours}qkv.{parameter}",
                names=(f"{theirs}{part}_proj.{kind}",),
                shape=shape,
                first_row=first_row,
            )
        first_row += rows
    yield _whole(f"{ours}output.weight_ND", f"{theirs}o_proj.weight", (size, spec.q_size))
    if spec.has_output_bias:
        yield _whole(f"{ours}output.bias_N", f"{theirs}o_proj.bias", (size,))
    if spec.qk_norm != "none":
        yield _whole(f"{ours}q_norm.weight_D", f"{theirs}q_norm.weight", (spec.q_norm_size,))
        yield _whole(f"{ours}k_norm.weight_D", f"{theirs}k_norm.weight", (spec.k_norm_size,))


def _dense(spec: DenseMLPSpec, size: int, ours: str, blocks: tuple[str, ...]) -> Iterator[Slot]:
    inner = spec.inner_size
    for row, part in ((0, "gate_proj"), (inner, "up_proj")):
        yield Slot(
            parameter=f"{ours}gate_up.weight_ND",
            names=tuple(f"{block}{part}.weight" for block in blocks),
            shape=(inner, size),
            first_row=row,
        )
    yield Slot(
        parameter=f"{ours}down.weight_ND",
        names=tuple(f"{block}down_proj.weight" for block in blocks),
        shape=(size, inner),
    )


def _moe(
    spec: MoESpec,
    size: int,
    ours: str,
    blocks: tuple[str, ...],
    names: CheckpointNames,
    shapes: Mapping[str, Shape],
) -> Iterator[Slot]:
    yield Slot(
        parameter=f"{ours}router.weight_ED",
        names=tuple(f"{block}gate.weight" for block in blocks),
        shape=(spec.num_experts, size),
    )
    yield from _experts(spec, size, f"{ours}experts.", blocks, names, shapes)
    if spec.shared is None:
        return
    shared = DenseMLPSpec(inner_size=spec.shared.inner_size)
    shared_blocks = tuple(f"{block}shared_expert." for block in blocks)
    yield from _dense(shared, size, f"{ours}shared.", shared_blocks)
    if spec.shared.has_gate:
        yield Slot(
            parameter=f"{ours}shared_gate.weight_ND",
            names=tuple(f"{block}shared_expert_gate.weight" for block in blocks),
            shape=(1, size),
        )


def _experts(
    spec: MoESpec,
    size: int,
    ours: str,
    blocks: tuple[str, ...],
    names: CheckpointNames,
    shapes: Mapping[str, Shape],
) -> Iterator[Slot]:
    """Each of the two parameters comes from one stacked tensor, or expert by expert."""
    inner = spec.inner_size
    gate_up = _Stack(f"{ours}gate_up_EGD", "gate_up_proj", (spec.num_experts, 2 * inner, size))
    down = _Stack(f"{ours}down_EDF", "down_proj", (spec.num_experts, size, inner))
    stacks = (gate_up, down)
    directions = {stack.is_transposed(blocks, shapes) for stack in stacks} - {None}
    for stack in stacks:
        if stack.find(blocks, shapes) is not None:
            own = stack.is_transposed(blocks, shapes)
            # A square tensor does not show its direction: it goes by the other one of its layer.
            yield stack.slot(blocks, directions == {True} if own is None else own)
        else:
            parts = (names.expert_gate, names.expert_up) if stack is gate_up else ()
            yield from _each_expert(stack, blocks, parts or (names.expert_down,))


def _each_expert(stack: _Stack, blocks: tuple[str, ...], parts: tuple[str, ...]) -> Iterator[Slot]:
    num_experts, rows, columns = stack.shape
    rows //= len(parts)
    for index in range(num_experts * len(parts)):
        expert, part = divmod(index, len(parts))
        yield Slot(
            parameter=stack.parameter,
            names=tuple(f"{block}experts.{expert}.{parts[part]}.weight" for block in blocks),
            shape=(rows, columns),
            first_row=index * rows,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Stack:
    """The weights of all experts of a layer as one tensor, perhaps transposed."""

    parameter: str
    name: str
    shape: tuple[int, int, int]

    def names(self, blocks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{block}experts.{self.name}" for block in blocks)

    def find(self, blocks: tuple[str, ...], shapes: Mapping[str, Shape]) -> Shape | None:
        found = (shapes[name] for name in self.names(blocks) if name in shapes)
        return next(found, None)

    def is_transposed(self, blocks: tuple[str, ...], shapes: Mapping[str, Shape]) -> bool | None:
        """None where there is no such tensor or its shape does not tell."""
        found = self.find(blocks, shapes)
        if found is None or self.shape[1] == self.shape[2]:
            return None
        return found == self._transposed

    def slot(self, blocks: tuple[str, ...], is_transposed: bool) -> Slot:
        return Slot(
            parameter=self.parameter,
            names=self.names(blocks),
            shape=self._transposed if is_transposed else self.shape,
            is_transposed=is_transposed,
        )

    @property
    def _transposed(self) -> tuple[int, int, int]:
        num_experts, rows, columns = self.shape
        return num_experts, columns, rows
