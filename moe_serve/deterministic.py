"""What `--deterministic` promises, checked on this machine before anything is served.

Weights split by columns are the only products whose shape depends on the number of ranks there;
the rest is whole (see `ModelShard`), and nothing is summed across ranks.
"""

from __future__ import annotations

import torch

from moe_serve.errors import ConfigError
from moe_serve.kernels.linear import columns_agree
from moe_serve.models.shard import ModelShard
from moe_serve.models.spec import AttentionSpec, DecoderSpec, MoESpec
from moe_serve.parallel.shard import Span

# The own columns of a weight, and how many all ranks have.
_Columns = tuple[tuple[int, ...], int]


def check_columns(spec: DecoderSpec, shard: ModelShard, dtype: torch.dtype) -> None:
    """Raises `ConfigError` where the promise cannot be kept; does nothing without the option."""
    if not shard.layout.deterministic:
        return
    for name, (columns, num_columns) in sorted(_split_weights(spec, shard)):
        own = torch.tensor(columns)
        if not columns_agree(own, num_columns, spec.hidden_size, dtype):
            raise ConfigError(
                f"--deterministic cannot be kept here: for {name}, {len(columns)} of {num_columns} "
                f"columns by {spec.hidden_size} in {dtype}, this machine's matrix library sums in "
                "another order than for all of them; drop it, or use another "
                "--tensor-parallel-size or --num-threads"
            )


def _split_weights(spec: DecoderSpec, shard: ModelShard) -> set[tuple[str, _Columns]]:
    if shard.layout.tensor_size == 1:
        return set()
    found = {("the LM head", _columns(shard.vocab(spec.vocab_size), of=spec.vocab_size))}
    for layer in spec.layers:
        found.add(("q, k and v", _qkv(layer.attention, shard)))
        inner_size = layer.mlp.inner_size
        if isinstance(layer.mlp, MoESpec):
            found.add(
                ("gate and up of an expert", _gate_up(shard.expert_inner(inner_size), inner_size))
            )
        else:
            found.add(("gate and up", _gate_up(shard.inner(inner_size), inner_size)))
    return found


def _columns(*spans: Span, of: int) -> _Columns:
    return tuple(column for span in spans for column in range(*span)), of


def _qkv(spec: AttentionSpec, shard: ModelShard) -> _Columns:
    own = shard.heads(spec)
    kv = own.kv_heads.scaled(spec.head_dim)
    parts = (
        own.heads.scaled(spec.head_dim),
        kv.shifted(spec.q_size),
        kv.shifted(spec.q_size + spec.kv_size),
    )
    return _columns(*parts, of=spec.qkv_size)


def _gate_up(own: Span, inner_size: int) -> _Columns:
    return _columns(own, own.shifted(inner_size), of=2 * inner_size)
