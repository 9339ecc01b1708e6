"""All tensors that a decoder's checkpoint must hold, and what one rank takes of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_serve.models.expert_sources import expert_sources
from moe_serve.models.names import CheckpointNames
from moe_serve.models.shard import WHOLE_MODEL, ModelShard
from moe_serve.models.slots import BlockNames, Shape, Slot, Source
from moe_serve.models.spec import AttentionSpec, DecoderSpec, MoESpec
from moe_serve.parallel.shard import Span


def decoder_sources(
    spec: DecoderSpec,
    names: CheckpointNames,
    shapes: Mapping[str, Shape],
    shard: ModelShard = WHOLE_MODEL,
) -> list[Source]:
    """All tensors of a decoder. `shapes`: what the checkpoint holds; decides the expert layout."""
    size = spec.hidden_size
    table, rows = (spec.vocab_size, size), shard.vocab(spec.vocab_size)
    sources = [
        _matrix("embedding.weight_VD", ("model.embed_tokens.weight",), table, rows=rows),
        _matrix("norm.weight_D", ("model.norm.weight",), (size,)),
    ]
    if not spec.tie_embeddings:
        sources.append(_matrix("head.weight_ND", ("lm_head.weight",), table, rows=rows))
    moe_index = 0
    for index, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        for norm, name in norms.items():
            sources.append(_matrix(f"{ours}{norm}.weight_D", (f"{theirs}{name}.weight",), (size,)))
        attention = BlockNames(f"{ours}attention.", (f"{theirs}self_attn.",))
        sources += _attention(layer.attention, size, attention, shard)
        if isinstance(layer.mlp, MoESpec):
            blocks = tuple(f"{theirs}{prefix}." for prefix in names.moe_prefixes)
            block = BlockNames(f"{ours}mlp.", blocks)
            sources += _moe(layer.mlp, size, block, names, shapes, shard, moe_index)
            moe_index += 1
        else:
            inner = layer.mlp.inner_size
            own = shard.inner(inner), shard.down_columns(inner)
            sources += _dense(inner, *own, size, BlockNames(f"{ours}mlp.", (f"{theirs}mlp.",)))
    return sources


def _matrix(
    parameter: str,
    names: tuple[str, ...],
    shape: Shape,
    *,
    rows: Span | None = None,
    columns: Span | None = None,
    first_row: int = 0,
) -> Source:
    """A matrix or vector of which this rank takes some rows or columns, by default all."""
    rows = rows or Span(0, shape[0])
    part = (rows, columns or Span(0, shape[1])) if len(shape) == 2 else (rows,)
    place = (Span(first_row, first_row + rows.size),)
    return Source(
        names=names, shape=shape, slots=(Slot(parameter=parameter, part=part, place=place),)
    )


def _attention(
    spec: AttentionSpec, size: int, names: BlockNames, shard: ModelShard
) -> Iterator[Source]:
    ours, own = names.ours, shard.heads(spec)
    first_row = 0
    for part, rows, heads in (
        ("q", spec.q_size, own.heads),
        ("k", spec.kv_size, own.kv_heads),
        ("v", spec.kv_size, own.kv_heads),
    ):
        kinds: list[tuple[str, str, Shape]] = [("weight", "weight_ND", (rows, size))]
        if spec.has_qkv_bias:
            kinds.append(("bias", "bias_N", (rows,)))
        own_rows = heads.scaled(spec.head_dim)
        for kind, parameter, shape in kinds:
            yield _matrix(
                f"{ours}qkv.{parameter}",
                names.all(f"{part}_proj.{kind}"),
                shape,
                rows=own_rows,
                first_row=first_row,
            )
        first_row += own_rows.size
    yield _matrix(
        f"{ours}output.weight_ND",
        names.all("o_proj.weight"),
        (size, spec.q_size),
        columns=shard.output_columns(spec),
    )
    if spec.has_output_bias:
        yield _matrix(f"{ours}output.bias_N", names.all("o_proj.bias"), (size,))
    if spec.qk_norm != "none":
        for norm, norm_size in (("q_norm", spec.q_norm_size), ("k_norm", spec.k_norm_size)):
            yield _matrix(f"{ours}{norm}.weight_D", names.all(f"{norm}.weight"), (norm_size,))


def _dense(
    inner_size: int, rows: Span, down_columns: Span, size: int, names: BlockNames
) -> Iterator[Source]:
    """`rows`: of gate and of up."""
    for first_row, part in ((0, "gate_proj"), (rows.size, "up_proj")):
        yield _matrix(
            f"{names.ours}gate_up.weight_ND",
            names.all(f"{part}.weight"),
            (inner_size, size),
            rows=rows,
            first_row=first_row,
        )
    yield _matrix(
        f"{names.ours}down.weight_ND",
        names.all("down_proj.weight"),
        (size, inner_size),
        columns=down_columns,
    )


def _moe(
    spec: MoESpec,
    size: int,
    block: BlockNames,
    names: CheckpointNames,
    shapes: Mapping[str, Shape],
    shard: ModelShard,
    moe_index: int,
) -> Iterator[Source]:
    router = f"{block.ours}router.weight_ED"
    yield _matrix(router, block.all("gate.weight"), (spec.num_experts, size))
    yield from expert_sources(spec, size, block, names, shapes, shard, moe_index)
    if spec.shared is None:
        return
    inner = spec.shared.inner_size
    shared = BlockNames(f"{block.ours}shared.", block.all("shared_expert."))
    yield from _dense(inner, Span(0, inner), Span(0, inner), size, shared)
    if spec.shared.has_gate:
        gate = f"{block.ours}shared_gate.weight_ND"
        yield _matrix(gate, block.all("shared_expert_gate.weight"), (1, size))
