"""Degrees that a model cannot be spread over are refused by its config alone."""

from __future__ import annotations

import dataclasses
import re

import pytest

from moe_serve.errors import ConfigError
from moe_serve.models.fit import check_deterministic, check_fit
from moe_serve.models.shard import ModelShard
from moe_serve.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseMLPSpec,
    LayerSpec,
    MoESpec,
    RopeSpec,
    SharedExpertSpec,
)
from moe_serve.parallel.layout import RankLayout
from moe_serve.routing.router import RouterSpec

MORE = "and --data-parallel-size for more ranks"


def decoder(
    *,
    heads: int = 8,
    kv_heads: int | None = None,
    dense: int | None = None,
    inner: int | None = 32,
    experts: int = 8,
    vocab: int = 320,
    shared: int = 48,
) -> DecoderSpec:
    """One layer with experts of size `inner` and one dense layer of size `dense`, or either."""
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=16,
        rope=RopeSpec(theta=1e4, rotary_dim=16),
        qk_norm="projection",
    )
    mlps: list[DenseMLPSpec | MoESpec] = []
    if inner is not None:
        router = RouterSpec(top_k=2, renormalize=True)
        mlps.append(
            MoESpec(
                num_experts=experts,
                inner_size=inner,
                router=router,
                shared=SharedExpertSpec(inner_size=shared, has_gate=True),
            )
        )
    if dense is not None:
        mlps.append(DenseMLPSpec(inner_size=dense))
    return DecoderSpec(
        architecture="TinyForCausalLM",
        vocab_size=vocab,
        hidden_size=64,
        layers=tuple(LayerSpec(attention=attention, mlp=mlp) for mlp in mlps),
        norm_eps=1e-6,
        tie_embeddings=False,
        max_position=256,
    )


def refusal(spec: DecoderSpec, tensor_size: int, **layout: bool) -> str | None:
    try:
        check_fit(spec, RankLayout(tensor_size=tensor_size, **layout))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_fewer_kv_heads_than_ranks_are_copied(tensor_size: int) -> None:
    spec = decoder(heads=8, kv_heads=2)
    check_fit(spec, RankLayout(tensor_size=tensor_size))
    for rank in range(tensor_size):
        layout = RankLayout(rank=rank, tensor_size=tensor_size)
        kv_heads = ModelShard(layout=layout).heads(spec.layers[0].attention).kv_heads
        first = rank * 2 // tensor_size
        assert kv_heads == (first, first + max(1, 2 // tensor_size))


def test_kv_heads_that_map_onto_no_rank_are_refused_with_both_numbers() -> None:
    assert refusal(decoder(heads=6, kv_heads=3), 2) == (
        "--tensor-parallel-size 2: the model's 3 KV heads (6 attention heads) can neither be "
        f"divided over 2 ranks nor copied evenly to them; use --tensor-parallel-size 1, {MORE}"
    )


@pytest.mark.parametrize(
    ("fields", "tensor_size", "message"),
    [
        ({"heads": 12, "kv_heads": 4, "inner": 36}, 6,
         f"the model's 4 KV heads (12 attention heads) can neither be divided over 6 ranks nor "
         f"copied evenly to them; use --tensor-parallel-size 1, 2 or 4, {MORE}"),
        ({"heads": 8}, 3, f"the model's 8 attention heads do not divide by 3; "
                          f"use --tensor-parallel-size 1 or 2, {MORE}"),
        ({"heads": 4, "kv_heads": 2}, 8, f"the model's 4 attention heads do not divide by 8; "
                                         f"use --tensor-parallel-size 1, 2 or 4, {MORE}"),
        ({"heads": 4, "kv_heads": 2}, 10**9, f"do not divide by {10**9}; "
                                             f"use --tensor-parallel-size 1, 2 or 4, {MORE}"),
        ({"dense": 42}, 4, f"the inner size 42 of dense layers does not divide by 4; "
                           f"use --tensor-parallel-size 1 or 2, {MORE}"),
        ({"inner": 33}, 2, f"the inner size 33 of each expert does not divide by 2; "
                           f"use --tensor-parallel-size 1, {MORE}; or add "
                           f"--enable-expert-parallel, which leaves each expert whole"),
        ({"vocab": 7}, 8, f"the model's 7 vocabulary entries are fewer than 8 ranks; "
                          f"use --tensor-parallel-size 1, 2 or 4, {MORE}"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_would(fields, tensor_size: int, message: str) -> None:
    found = refusal(decoder(**fields), tensor_size)
    assert found is not None and found.startswith(f"--tensor-parallel-size {tensor_size}: ")
    assert found.endswith(message)


def test_only_what_helps_is_advised() -> None:
    """Whole experts would not make heads or dense layers fit; and the sizes offered do fit."""
    for fields in (
        {"heads": 12, "inner": 33, "dense": 42},
        {"dense": 33},
        {"heads": 6, "inner": 9},
    ):
        spec = decoder(**fields)
        for expert_parallel in (False, True):
            found = refusal(spec, 4, expert_parallel=expert_parallel)
            assert found is not None and "--enable-expert-parallel" not in found
            offered = re.search(r"use --tensor-parallel-size ([\d, or]+), and", found)
            assert offered is not None
            sizes = set(map(int, re.findall(r"\d+", offered[1])))
            fitting = {
                size
                for size in (1, 2, 3, 4)
                if refusal(spec, size, expert_parallel=expert_parallel) is None
            }
            assert sizes == fitting


@pytest.mark.parametrize(("experts", "data_size"), [(8, 3), (2, 4), (7, 2)])
def test_experts_need_not_divide_by_ranks(experts: int, data_size: int) -> None:
    """8 experts on 3 ranks: 3 + 3 + 2. Fewer than ranks: some hold none."""
    layouts = [
        RankLayout(rank=rank, data_size=data_size, expert_parallel=True)
        for rank in range(data_size)
    ]
    for layout in layouts:
        check_fit(decoder(experts=experts, inner=33), layout)
    counts = [len(ModelShard(layout=layout).experts(0, experts)) for layout in layouts]
    assert sum(counts) == experts and max(counts) - min(counts) <= 1


def test_whole_parts_need_not_divide() -> None:
    """Shared experts and, with expert parallelism, experts stay whole; the vocabulary is uneven."""
    check_fit(
        decoder(shared=49, inner=33, vocab=321), RankLayout(tensor_size=4, expert_parallel=True)
    )


def test_one_layer_that_differs_is_enough() -> None:
    spec = decoder(heads=8)
    odd = dataclasses.replace(spec.layers[0].attention, num_heads=6, num_kv_heads=6)
    layers = (*spec.layers, dataclasses.replace(spec.layers[0], attention=odd))
    found = refusal(dataclasses.replace(spec, layers=layers), 4)
    assert found is not None and "6 attention heads" in found and "size 1 or 2," in found


def test_expert_parallelism_needs_experts() -> None:
    message = "--enable-expert-parallel: TinyForCausalLM has no layer with experts"
    with pytest.raises(ConfigError, match=message):
        check_fit(decoder(inner=None, dense=64), RankLayout(data_size=2, expert_parallel=True))


def test_deterministic_is_for_cpus() -> None:
    layout = RankLayout(tensor_size=2, deterministic=True)
    check_deterministic(layout, "cpu")
    check_deterministic(RankLayout(tensor_size=2), "cuda")
    with pytest.raises(ConfigError, match="--deterministic on cuda: .* proven on CPU only so far"):
        check_deterministic(layout, "cuda")
