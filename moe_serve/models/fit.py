"""Whether a model can be spread over ranks as asked: found out before a weight is read. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_serve.errors import ConfigError
from moe_serve.models.spec import AttentionSpec, DecoderSpec, DenseMLPSpec, MoESpec
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.shard import can_split_heads


def check_fit(spec: DecoderSpec, layout: RankLayout) -> None:
    """Raises `ConfigError` where some rank would get a broken part of a weight.

    Experts need not divide by ranks: some hold one more than others, or none.
    """
    if layout.expert_parallel and not spec.moe_layers:
        raise ConfigError(
            f"--enable-expert-parallel: {spec.architecture} has no layer with experts here; drop it"
        )
    size = layout.tensor_size
    obstacle = next(_obstacles(spec, size, layout.expert_parallel), None)
    if obstacle is not None:
        raise ConfigError(
            f"--tensor-parallel-size {size}: {obstacle}; {_fixes(spec, size, layout)}"
        )


def check_deterministic(layout: RankLayout, device_type: str) -> None:
    """Raises `ConfigError` where the promise of --deterministic is not kept yet."""
    if layout.deterministic and device_type != "cpu":
        raise ConfigError(
            f"--deterministic on {device_type}: equal bits are proven on CPU only so far; drop it, "
            "or use --device cpu"
        )


def _fixes(spec: DecoderSpec, size: int, layout: RankLayout) -> str:
    # No rank goes without a head.
    most = min(size, *(attention.num_heads for attention in _attentions(spec)))
    fitting = [
        other
        for other in range(1, most + 1)
        if next(_obstacles(spec, other, layout.expert_parallel), None) is None
    ]
    fix = f"use --tensor-parallel-size {_either(fitting)}, and --data-parallel-size for more ranks"
    if spec.moe_layers and next(_obstacles(spec, size, True), None) is None:
        fix += "; or add --enable-expert-parallel, which leaves each expert whole"
    return fix


def _obstacles(spec: DecoderSpec, size: int, expert_parallel: bool) -> Iterator[str]:
    """What keeps `size` ranks from sharing a lane of this model."""
    for attention in _attentions(spec):
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if heads % size:
            yield f"the model's {heads} attention heads do not divide by {size}"
        elif not can_split_heads(heads, kv_heads, size):
            yield (
                f"the model's {kv_heads} KV heads ({heads} attention heads) can neither be divided "
                f"over {size} ranks nor copied evenly to them"
            )
    if spec.vocab_size < size:
        yield f"the model's {spec.vocab_size} vocabulary entries are fewer than {size} ranks"
    for mlp in dict.fromkeys(layer.mlp for layer in spec.layers):
        if isinstance(mlp, DenseMLPSpec) and mlp.inner_size % size:
            yield f"the inner size {mlp.inner_size} of dense layers does not divide by {size}"
        if isinstance(mlp, MoESpec) and not expert_parallel and mlp.inner_size % size:
            yield f"the inner size {mlp.inner_size} of each expert does not divide by {size}"


def _attentions(spec: DecoderSpec) -> Sequence[AttentionSpec]:
    """The different ones."""
    return list(dict.fromkeys(layer.attention for layer in spec.layers))


def _either(sizes: Sequence[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
