"""The operations of a step, each as calls that take turns over layers, and what they must do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from moe_serve.bench.kernels.rig import Rig
from moe_serve.bench.ruler import Call
from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.attention_inputs import HeadNorms, attention_inputs
from moe_serve.kernels.paged_attention import paged_attention
from moe_serve.layers.attention import Attention
from moe_serve.layers.moe import MoE
from moe_serve.layers.rotary import RotaryTable
from moe_serve.models.decoder import DecoderLayer
from moe_serve.parallel.group import SOLO
from moe_serve.parallel.slices import TokenSlices

# Shapes: T tokens, D model, N out, K top-k, q k v columns of all heads, H heads, h head_dim.

# Keys and values of all calls of a case: so many caches of them are enough to find none there.
POOL_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`calls`: the same on a layer of its own each. Of one call at least: `num_bytes` read and
    written, `flops` of products in `dtype`. `footprint`: what all calls read and write.
    """

    op: str
    shape: str
    tokens: int
    calls: Sequence[Call]
    num_bytes: float
    flops: float
    dtype: torch.dtype
    footprint: float


Maker = Callable[[Rig, int], Case | None]


def all_cases(
    rig: Rig, ops: Sequence[str], tokens: Sequence[int], *, context: int, max_num_seqs: int
) -> Iterator[Case]:
    """One after the other, so that their inputs do not all exist at once. More than `max_num_seqs`
    tokens are a prompt's: there is no decode of so many.
    """
    makers: dict[str, Maker] = {
        "linear qkv": linear_qkv,
        "linear output": linear_output,
        "linear head": linear_head,
        "router": router,
        "moe": moe,
        "rms_norm": rms_norm,
        "attention_inputs": inputs_of_attention,
        "attention decode": lambda rig, T: (
            attention_decode(rig, T, context) if T <= max_num_seqs else None
        ),
        "attention prefill": attention_prefill,
    }
    assert makers.keys() == set(OPS)
    for op, make in makers.items():
        if op not in ops:
            continue
        for num_tokens in tokens:
            case = make(rig, num_tokens)
            if case is not None:
                yield case


OPS = (
    "linear qkv",
    "linear output",
    "linear head",
    "router",
    "moe",
    "rms_norm",
    "attention_inputs",
    "attention decode",
    "attention prefill",
)


def linear_qkv(rig: Rig, num_tokens: int) -> Case:
    projections = [layer.attention.qkv for layer in rig.layers]
    x_TD = _random(rig, num_tokens, rig.spec.hidden_size)
    calls = [partial(one, x_TD) for one in projections]
    return _linear(rig, "linear qkv", calls, num_tokens, projections[0].weight_ND.shape)


def linear_output(rig: Rig, num_tokens: int) -> Case:
    outputs = [layer.attention.output for layer in rig.layers]
    slices = TokenSlices(SOLO, num_tokens)
    x_TD = _random(rig, num_tokens, outputs[0].weight_ND.shape[1])
    calls = [partial(one, x_TD, slices) for one in outputs]
    return _linear(rig, "linear output", calls, num_tokens, outputs[0].weight_ND.shape)


def linear_head(rig: Rig, num_tokens: int) -> Case:
    """One weight: it stays in a cache that holds it, as it would from step to step."""
    x_TD = _random(rig, num_tokens, rig.spec.hidden_size)
    shape = torch.Size((rig.spec.vocab_size, rig.spec.hidden_size))
    return _linear(rig, "linear head", [partial(rig.decoder.logits, x_TD)], num_tokens, shape)


def _linear(rig: Rig, op: str, calls: Sequence[Call], num_tokens: int, shape: torch.Size) -> Case:
    rows, columns = shape
    weight = rows * columns * rig.dtype.itemsize
    return Case(
        op=op,
        shape=f"{columns}x{rows}",
        tokens=num_tokens,
        calls=calls,
        num_bytes=weight + num_tokens * (rows + columns) * rig.dtype.itemsize,
        flops=2.0 * num_tokens * rows * columns,
        dtype=rig.dtype,
        footprint=weight * len(calls),
    )


def router(rig: Rig, num_tokens: int) -> Case:
    """Scores in fp32, and the choice."""
    routers = [_moe(layer).router for layer in rig.layers]
    experts, hidden = routers[0].weight_ED.shape
    x_TD = _random(rig, num_tokens, hidden)
    weight = 4.0 * experts * hidden
    return Case(
        op="router",
        shape=f"{hidden}x{experts} top-{routers[0].spec.top_k}",
        tokens=num_tokens,
        calls=[partial(one, x_TD) for one in routers],
        num_bytes=weight + num_tokens * (hidden * rig.dtype.itemsize + 4 * experts),
        flops=2.0 * num_tokens * experts * hidden,
        dtype=torch.float32,
        footprint=weight * len(routers),
    )


def moe(rig: Rig, num_tokens: int) -> Case:
    """Tokens with their experts chosen -> the weighted sums: permute, two products, combine."""
    spec = rig.spec.moe_layers[0]
    x_TD = _random(rig, num_tokens, rig.spec.hidden_size)
    routings = [rig.routing(num_tokens) for _ in rig.layers]
    layers = [_moe(layer) for layer in rig.layers]
    used = [int(torch.unique(routing.ids_TK).numel()) for routing in routings]
    bank = layers[0].experts
    expert_bytes = (bank.gate_up_EGD.nbytes + bank.down_EDF.nbytes) / spec.num_experts
    activations = 2 * num_tokens * rig.spec.hidden_size * rig.dtype.itemsize
    rows = num_tokens * spec.router.top_k
    return Case(
        op="moe",
        shape=f"{rig.spec.hidden_size}x{spec.inner_size}, {spec.num_experts} top-"
        f"{spec.router.top_k}",
        tokens=num_tokens,
        calls=[
            partial(layer.path.run, x_TD, routing, layer.experts, num_tokens)
            for layer, routing in zip(layers, routings, strict=True)
        ],
        num_bytes=sum(used) / len(used) * expert_bytes + activations,
        flops=6.0 * rows * rig.spec.hidden_size * spec.inner_size,
        dtype=rig.dtype,
        footprint=sum(used) * expert_bytes,
    )


def rms_norm(rig: Rig, num_tokens: int) -> Case:
    """The addition to the stream, and the norm of it: two tensors in, two out."""
    hidden = rig.spec.hidden_size
    pairs = [
        (_random(rig, num_tokens, hidden), _random(rig, num_tokens, hidden)) for _ in rig.layers
    ]
    size = num_tokens * hidden * rig.dtype.itemsize
    return Case(
        op="rms_norm",
        shape=f"{hidden}",
        tokens=num_tokens,
        calls=[
            partial(layer.mlp_norm.add_and_norm, x, y)
            for layer, (x, y) in zip(rig.layers, pairs, strict=True)
        ],
        num_bytes=4.0 * size,
        flops=0.0,
        dtype=rig.dtype,
        footprint=4.0 * size * len(pairs),
    )


def inputs_of_attention(rig: Rig, num_tokens: int) -> Case:
    """Norms of heads, rotation, and the store of keys and values."""
    context = rig.prefill_context(num_tokens)
    pools = rig.pools(context.block_tables_SB.numel(), len(rig.layers))
    first = rig.layers[0].attention
    columns = first.q_size + 2 * first.kv_size
    qkv = _random(rig, num_tokens, columns)
    table = RotaryTable(first.spec.rope, rig.spec.max_position, qkv.device, rig.dtype)
    angles = table.lookup(context.positions_T, num_tokens)
    calls = []
    for layer, pool in zip(rig.layers, pools, strict=True):
        q_THh, k_TNh, v_TNh = _heads(layer.attention, qkv)
        norms = _norms(layer.attention)
        calls.append(
            partial(attention_inputs, q_THh, k_TNh, v_TNh, *angles, pool, context.slots_T, norms)
        )
    moved = 2 * columns + 2 * first.spec.rope.rotary_dim
    num_bytes = float(num_tokens * moved * rig.dtype.itemsize)
    return Case(
        op="attention_inputs",
        shape=_head_shape(first),
        tokens=num_tokens,
        calls=calls,
        num_bytes=num_bytes,
        flops=0.0,
        dtype=rig.dtype,
        footprint=num_bytes * len(calls),
    )


def attention_decode(rig: Rig, num_tokens: int, length: int) -> Case:
    """Each token sees `length` positions of a sequence of its own."""
    context = rig.decode_context(num_tokens, length)
    return _attention(rig, "attention decode", context, f" context {length}", num_tokens * length)


def attention_prefill(rig: Rig, num_tokens: int) -> Case:
    """A prompt's tokens, each of which sees those before it."""
    context = rig.prefill_context(num_tokens)
    return _attention(rig, "attention prefill", context, "", num_tokens * (num_tokens + 1) // 2)


def _attention(rig: Rig, op: str, context: StepContext, what: str, num_pairs: int) -> Case:
    first, num_tokens = rig.layers[0].attention, context.num_tokens
    num_blocks = context.block_tables_SB.numel()
    keys = 2.0 * sum(context.context_lens) * first.kv_size * rig.dtype.itemsize
    pools = rig.pools(num_blocks, max(1, min(len(rig.layers), int(POOL_BYTES // keys))))
    q_THh = _random(rig, num_tokens, first.spec.num_heads, first.spec.head_dim)

    def attend(pool: LayerKV) -> torch.Tensor:
        spec = first.spec
        return paged_attention(q_THh, pool, context, scale=spec.scale, window=spec.window)

    return Case(
        op=op,
        shape=_head_shape(first) + what,
        tokens=num_tokens,
        calls=[partial(attend, pool) for pool in pools],
        num_bytes=keys + 2 * num_tokens * first.q_size * rig.dtype.itemsize,
        flops=4.0 * num_pairs * first.q_size,
        dtype=rig.dtype,
        footprint=keys * len(pools),
    )


def _moe(layer: DecoderLayer) -> MoE:
    assert isinstance(layer.mlp, MoE)
    return layer.mlp


def _random(rig: Rig, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(rig.dtype)


def _heads(attention: Attention, qkv: torch.Tensor) -> list[torch.Tensor]:
    """[T, q + k + v] -> views of queries, keys and values by head."""
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    return [
        part.view(len(qkv), -1, attention.spec.head_dim) for part in torch.split(qkv, sizes, -1)
    ]


def _norms(attention: Attention) -> HeadNorms | None:
    """Norms over whole projections are not a part of this operation."""
    if attention.spec.qk_norm != "head":
        return None
    assert attention.q_norm is not None and attention.k_norm is not None
    return HeadNorms(attention.q_norm.weight_D, attention.k_norm.weight_D, attention.q_norm.eps)


def _head_shape(attention: Attention) -> str:
    spec = attention.spec
    return f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
