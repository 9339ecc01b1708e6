"""Norms, what attention reads, and the router, with every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_serve.context import LayerKV
from moe_serve.kernels.attention_inputs import attention_inputs_torch, projected_inputs_torch
from moe_serve.kernels.cpu.library import Library
from moe_serve.kernels.cpu.router import topk_router_cpu
from moe_serve.kernels.cpu.rows import attention_inputs_cpu, norm_rows_cpu, projected_inputs_cpu
from moe_serve.kernels.rms_norm import rms_norm_torch
from moe_serve.kernels.topk_router import topk_router_torch

# Shapes: T tokens, E experts, C phases, H heads, N kv heads, h head_dim.

DTYPES = [torch.bfloat16, torch.float32]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 64, 1000])
def test_norms_after_an_addition_and_alone(
    kernels: Library, dtype: torch.dtype, width: int
) -> None:
    x, y = normal(37, width, dtype=dtype), normal(37, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2)
    added = norm_rows_cpu(x, y, weight, 1e-6)
    plain = norm_rows_cpu(added[0], None, weight, 1e-6) if added else None
    assert added is not None and plain is not None
    assert torch.equal(added[0], x + y) and torch.equal(added[1], plain[1])
    expected = rms_norm_torch(x + y, weight, 1e-6)
    torch.testing.assert_close(
        added[1], expected, rtol=1e-2 if dtype == DTYPES[0] else 1e-5, atol=0
    )
    alone = norm_rows_cpu(x[5:6], y[5:6], weight, 1e-6)
    assert alone is not None and torch.equal(alone[1], added[1][5:6])
    wide = torch.cat((x, y), dim=1)[:, :width]
    apart = norm_rows_cpu(wide, None, weight, 1e-6)
    together = norm_rows_cpu(x, None, weight, 1e-6)
    assert apart is not None and together is not None and torch.equal(apart[1], together[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (40, 24), (6, 2)])
def test_what_attention_reads(
    kernels: Library, dtype: torch.dtype, has_norms: bool, head_dim: int, rotary: int
) -> None:
    tokens, heads, kv_heads = 9, 4, 2
    qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    parts = qkv.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), dim=1)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in parts)
    angles = normal(tokens, rotary // 2, seed=1).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (normal(head_dim, dtype=dtype, seed=2), normal(head_dim, dtype=dtype, seed=3), 1e-6)
    slots = torch.tensor([5, -1, 0, 31, 8, 9, 10, 11, 30])

    def run(op: object) -> tuple[Tensor, ...]:
        pool = [torch.full((4, 8, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
        kv = LayerKV(keys_BsNh=pool[0], values_BsNh=pool[1])
        out = op(q, k, v, cos, sin, kv, slots, norms if has_norms else None)  # type: ignore[operator]
        return out, *pool

    class Norms(tuple):  # type: ignore[type-arg]
        q_weight_h, k_weight_h, eps = norms

    def twin(*args: object) -> Tensor:
        *first, given = args
        return attention_inputs_torch(*first, None if given is None else Norms())  # type: ignore[arg-type]

    for found, expected in zip(run(attention_inputs_cpu), run(twin), strict=True):
        if has_norms:
            # Another order of the sum of squares.
            size = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(found, expected, rtol=size, atol=size)
        else:
            assert torch.equal(found, expected)


def test_pools_of_another_type_are_declined(kernels: Library) -> None:
    pool = torch.zeros(1, 4, 1, 8, dtype=torch.float8_e4m3fn)
    q = normal(1, 1, 8)
    kv = LayerKV(keys_BsNh=pool, values_BsNh=pool)
    assert attention_inputs_cpu(q, q, q, q[0], q[0], kv, torch.tensor([0])) is None


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_router_chooses_as_its_twin_does(
    kernels: Library, score: str, has_bias: bool, groups: tuple[int, int], renormalize: bool
) -> None:
    tokens, experts, top_k = 70, 16, 3
    logits = normal(tokens, experts) * 3
    logits[3] = 1.0
    logits[4, 5] = float("inf") if score == "sigmoid" else 50.0
    bias = normal(experts, seed=1) if has_bias else None
    phases = torch.arange(tokens, dtype=torch.int32) % 3
    results = []
    for op in (topk_router_cpu, topk_router_torch):
        load = torch.zeros(3, experts, dtype=torch.int64)
        found = op(
            logits, top_k, score=score, renormalize=renormalize, scale=2.5, correction_bias_E=bias,
            num_groups=groups[0], top_groups=groups[1], load_CE=load, phases_T=phases,
            num_valid_1=torch.tensor(66, dtype=torch.int32),
        )  # fmt: skip
        assert found is not None
        results.append((*found, load))
    (ids, weights, load), (wanted_ids, wanted_weights, wanted_load) = results
    assert torch.equal(ids, wanted_ids) and torch.equal(load, wanted_load)
    assert load.sum() == 66 * top_k
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-7)


def test_a_row_of_nan_gets_different_experts(kernels: Library) -> None:
    logits = normal(3, 8)
    logits[1] = float("nan")
    logits[2, 3] = float("nan")
    for score in ("softmax", "sigmoid"):
        found = topk_router_cpu(logits, 8, score=score, renormalize=True)
        assert found is not None
        assert found[0].sort(1).values.equal(torch.arange(8).repeat(3, 1))
        assert found[1][1].isnan().all() and found[1][0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_is_read_where_it_lies(kernels: Library, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, head_dim = 5, 4, 2, 24
    qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)[:, 3:]
    cos, sin = normal(tokens, head_dim, dtype=dtype), normal(tokens, head_dim, dtype=dtype, seed=1)
    slots = torch.tensor([3, 0, -1, 7, 6])
    results = []
    for op in (projected_inputs_cpu, projected_inputs_torch):
        pool = [torch.zeros(2, 4, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        kv = LayerKV(keys_BsNh=pool[0], values_BsNh=pool[1])
        results.append((op(qkv, heads, kv_heads, cos, sin, kv, slots), *pool))
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))
