"""The store of keys and values: into their slots, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_serve.context import LayerKV
from moe_serve.kernels.kv_store import kv_store_torch, kv_store_triton

FP8 = torch.float8_e4m3fn


def make_kv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerKV:
    pool = torch.full(shape, 7.0).to(dtype).to(device)
    scales = {"key_scale": 0.05, "value_scale": 3.0} if dtype == FP8 else {}
    return LayerKV(keys_BsNh=pool, values_BsNh=pool.clone(), **scales)


def rows_of_qkv(num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values as columns of one projection, so their rows are far apart."""
    rng = torch.Generator().manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, 3 * num_heads * dim, generator=rng) * 40
    return [part.unflatten(1, (num_heads, dim)) for part in qkv.to(dtype).chunk(3, 1)[1:]]


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, FP8),
        (torch.bfloat16, FP8),
    ],
)
@pytest.mark.parametrize(("num_tokens", "num_heads", "dim"), [(0, 2, 16), (7, 3, 13), (17, 2, 80)])
def test_rows_go_to_their_slots_and_padding_nowhere(
    device: torch.device,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    dim: int,
) -> None:
    k, v = rows_of_qkv(num_tokens, num_heads, dim, dtype)
    slots = torch.randperm(8 * 5, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[::3] = -1
    found = make_kv((8, 5, num_heads, dim), pool_dtype, device)
    expected = make_kv((8, 5, num_heads, dim), pool_dtype, device)
    kv_store_triton(k.to(device), v.to(device), found, slots.to(device))
    kv_store_torch(k.to(device), v.to(device), expected, slots.to(device))
    assert torch.equal(found.keys_BsNh.float(), expected.keys_BsNh.float())
    assert torch.equal(found.values_BsNh.float(), expected.values_BsNh.float())

    # And one by one.
    for pool, rows, scale in (
        (found.keys_BsNh, k, found.key_scale),
        (found.values_BsNh, v, found.value_scale),
    ):
        plain = torch.full((40, num_heads, dim), 7.0).to(pool_dtype).float()
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if slot >= 0:
                row = (row.float() / scale).clamp(-448, 448) if pool_dtype == FP8 else row.float()
                plain[slot] = row.to(pool_dtype).float()
        assert torch.equal(pool.float().cpu().flatten(0, 1), plain)


def test_damage_stays_visible_in_fp8(device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[[nan, -nan, inf, -inf]]], device=device)
    for store in (kv_store_triton, kv_store_torch):
        kv = make_kv((1, 2, 1, 4), FP8, device)
        store(rows, rows, kv, torch.tensor([1], device=device))
        assert kv.keys_BsNh[0, 1, 0].isnan().tolist() == [True, True, False, False]
        assert kv.keys_BsNh[0, 1, 0, 2:].tolist() == [448.0, -448.0]


def test_fp8_saturates(device: torch.device) -> None:
    kv = make_kv((1, 2, 1, 4), FP8, device)
    rows = torch.tensor([[[1e9, -1e9, 23.0, 0.0]]], device=device)
    kv_store_triton(rows, rows, kv, torch.tensor([1], device=device))
    assert kv.keys_BsNh[0, 1, 0].tolist() == [448.0, -448.0, 448.0, 0.0]
    assert kv.values_BsNh[0, 1, 0].tolist() == [448.0, -448.0, 7.5, 0.0]
