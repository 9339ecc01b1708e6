"""Norm, rotation and store in one pass equal the three one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_serve.context import LayerKV
from moe_serve.kernels.attention_inputs import (
    HeadNorms,
    attention_inputs_torch,
    attention_inputs_triton,
)

FP8 = torch.float8_e4m3fn


def inputs(
    num_tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys and values as columns of one projection."""
    rng = torch.Generator().manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim, generator=rng).to(dtype)
    parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    return [part.unflatten(1, (-1, dim)) for part in parts]


def angles(num_tokens: int, rotary_dim: int, dtype: torch.dtype) -> list[Tensor]:
    turns = torch.rand(num_tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    turns = torch.cat((turns, turns), dim=1)
    return [turns.cos().to(dtype), turns.sin().to(dtype)]


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, FP8)],
)
@pytest.mark.parametrize(
    ("num_tokens", "heads", "kv_heads", "dim", "rotary_dim"),
    [(0, 4, 2, 16, 16), (1, 32, 4, 128, 128), (7, 5, 1, 80, 32), (17, 6, 3, 13, 8)],
)
def test_it_equals_the_ops_one_by_one(
    device: torch.device,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    has_norms: bool,
    num_tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary_dim: int,
) -> None:
    q, k, v = (x.to(device) for x in inputs(num_tokens, heads, kv_heads, dim, dtype))
    cos, sin = (x.to(device) for x in angles(num_tokens, rotary_dim, dtype))
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:num_tokens]
    slots[1::3] = -1
    norms = None
    if has_norms:
        weights = torch.rand(2, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
        norms = HeadNorms(*weights.to(device), 1e-6)
    results = []
    for op in (attention_inputs_triton, attention_inputs_torch):
        pool = torch.full((8, 5, kv_heads, dim), 7.0, device=device).to(pool_dtype)
        scales = {"key_scale": 0.05, "value_scale": 3.0} if pool_dtype == FP8 else {}
        kv = LayerKV(keys_BsNh=pool, values_BsNh=pool.clone(), **scales)
        out = op(q, k, v, cos, sin, kv, slots.to(device), norms)
        results.append((out.float(), kv.keys_BsNh.float(), kv.values_BsNh.float()))
    # A norm's sum has an order, a rounding after it two outcomes.
    loose = {"rtol": 2**-3 if pool_dtype == FP8 else 4e-3 if dtype == torch.float16 else 1e-5}
    exact = {"rtol": 0.0, "atol": 0.0}
    keep = {**loose, "atol": 1e-5} if has_norms else exact
    for found, expected in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(found, expected, **keep)
    assert torch.equal(results[0][2], results[1][2])
