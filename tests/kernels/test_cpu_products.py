"""Products with packed weights: right, and a row's bits its own, with every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.combine import weigh_rows_torch
from moe_serve.kernels.cpu.library import Library
from moe_serve.kernels.cpu.packed import PackedWeight, can_pack
from moe_serve.kernels.cpu.products import (
    grouped_gemm_activation_cpu,
    grouped_gemm_cpu,
    linear_activation_cpu,
    linear_cpu,
    moe_cpu,
)
from moe_serve.kernels.grouped_gemm import grouped_gemm_activation_torch, grouped_gemm_torch
from moe_serve.kernels.permute import permute_torch
from moe_serve.kernels.silu_mul import gated_activation_torch
from moe_serve.kernels.take_rows import take_rows_torch

# Shapes: T tokens, K top-k, R rows, D in, N out, E experts, F inner, G = 2F.

DTYPES = [torch.bfloat16, torch.float32]
# Narrower than a vector, ragged, whole blocks; K that ends within a tile.
SIZES = [(1, 2), (17, 34), (64, 64), (100, 66), (192, 160)]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * shape[-1] ** -0.5).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within what rounding to the dtype allows; exact sums are taken in fp64."""
    size = 3e-5 if found.dtype == torch.float32 else 2e-2
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.double(), expected.double(), rtol=size, atol=size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_paired", [False, True])
def test_unpacking_gives_back_what_was_packed(
    kernels: Library, dtype: torch.dtype, is_paired: bool
) -> None:
    for rows, columns in [(2, 2), (34, 6), (64, 64), (130, 18)]:
        weight = normal(3, rows, columns, dtype=dtype)
        before = weight.clone()
        packed = PackedWeight.pack(weight, kernels, is_paired=is_paired)
        assert torch.equal(packed.unpacked(kernels), before)
        assert packed.data.flatten().sort().values.equal(before.flatten().sort().values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_linear_is_right_and_a_row_has_the_same_bits_in_any_company(
    kernels: Library, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    weight, bias = normal(*size, dtype=dtype), normal(size[0], dtype=dtype, seed=1)
    packed = PackedWeight.pack(weight.clone(), kernels)
    x = normal(201, size[1], dtype=dtype, seed=2) * 8
    found = linear_cpu(x, packed, bias)
    assert found is not None
    assert_near(found, (x.double() @ weight.double().T + bias.double()).to(dtype))
    for rows in (slice(0, 1), slice(3, 5), slice(7, 24), slice(100, 133), slice(0, 0)):
        alone = linear_cpu(x[rows].clone(), packed, bias)
        assert alone is not None and torch.equal(alone, found[rows])
    kernels.num_threads = 1
    again = linear_cpu(x, packed, bias)
    assert again is not None and torch.equal(again, found)


def test_linear_takes_rows_that_lie_apart(kernels: Library) -> None:
    weight = PackedWeight.pack(normal(40, 32, dtype=torch.bfloat16), kernels)
    x = normal(9, 96, dtype=torch.bfloat16)[:, 32:64]
    found, expected = linear_cpu(x, weight), linear_cpu(x.contiguous(), weight)
    assert found is not None and expected is not None and torch.equal(found, expected)


def test_nan_and_infinity_come_through(kernels: Library) -> None:
    weight = normal(64, 64, dtype=torch.bfloat16)
    weight[3, 5], weight[4, 5] = float("nan"), float("inf")
    packed = PackedWeight.pack(weight, kernels)
    found = linear_cpu(torch.ones(2, 64, dtype=torch.bfloat16), packed)
    assert found is not None
    assert found[:, 3].isnan().all() and found[:, 4].isinf().all()
    assert found.isfinite().sum() == 2 * 62


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_are_one_product(kernels: Library, dtype: torch.dtype, activation: str) -> None:
    for inner in (1, 17, 32, 80):
        weight = normal(2 * inner, 48, dtype=dtype)
        packed = PackedWeight.pack(weight.clone(), kernels, is_paired=True)
        x = normal(19, 48, dtype=dtype, seed=1) * 6
        found = linear_activation_cpu(x, packed, activation)
        gate_up = (x.double() @ weight.double().T).to(dtype)
        assert_near(found, gated_activation_torch(gate_up, activation))
        assert torch.equal(linear_activation_cpu(x[4:5], packed, activation), found[4:5])


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 7, 0], [201, 0, 1], [5, 33, 2]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_meets_its_expert(kernels: Library, dtype: torch.dtype, counts: list[int]) -> None:
    gate_up, down = normal(3, 80, 64, dtype=dtype), normal(3, 72, 40, dtype=dtype, seed=1)
    packed = PackedWeight.pack(gate_up.clone(), kernels, is_paired=True)
    packed_down = PackedWeight.pack(down.clone(), kernels)
    # Two rows more than the experts have.
    x, counts_E = normal(sum(counts) + 2, 64, dtype=dtype, seed=2) * 6, torch.tensor(counts)
    acts = grouped_gemm_activation_cpu(x, packed, counts_E, "silu")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    found = None if acts is None else grouped_gemm_cpu(acts, packed_down, counts_E, scatter_R=order)
    assert acts is not None and found is not None
    used = sum(counts)
    assert_near(acts[:used], grouped_gemm_activation_torch(x, gate_up, counts_E, "silu")[:used])
    expected = grouped_gemm_torch(acts, down, counts_E, scatter_R=order)
    assert_near(found[order[:used]], expected[order[:used]])


def by_parts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: PackedWeight, down: PackedWeight
) -> Tensor:
    """What ranks that exchange rows do, one op after the other."""
    permutation = permute_torch(ids, gate_up.shape[0])
    rows = take_rows_torch(x, permutation.order_R, ids.shape[1])
    acts = grouped_gemm_activation_cpu(rows, gate_up, permutation.counts_E, "silu")
    assert acts is not None
    out = grouped_gemm_cpu(acts, down, permutation.counts_E)
    assert out is not None
    return weigh_rows_torch(out, permutation.inverse_R, weights)


@pytest.mark.parametrize("routing", ["uniform", "one expert", "padded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_layer_has_the_bits_of_its_parts(
    kernels: Library, dtype: torch.dtype, routing: str
) -> None:
    experts, top_k, hidden, inner = 6, 2, 70, 36
    gate_up = PackedWeight.pack(
        normal(experts, 2 * inner, hidden, dtype=dtype), kernels, is_paired=True
    )
    down = PackedWeight.pack(normal(experts, hidden, inner, dtype=dtype, seed=1), kernels)
    for tokens in (1, 7, 17, 129):
        rng = torch.Generator().manual_seed(tokens)
        ids = torch.rand(tokens, experts, generator=rng).topk(top_k).indices
        weights = torch.rand(tokens, top_k, generator=rng)
        if routing == "one expert":
            ids = torch.tensor([[4, 1]]).repeat(tokens, 1)
        if routing == "padded":
            ids[-1], weights[-1] = -1, 0.0
        x = normal(tokens, hidden, dtype=dtype, seed=2) * 6
        found = moe_cpu(x, ids, weights, gate_up, down, "silu")
        assert torch.equal(found, by_parts(x, ids, weights, gate_up, down))
        assert torch.equal(found[:1], moe_cpu(x[:1], ids[:1], weights[:1], gate_up, down, "silu"))


def test_experts_may_stand_in_any_order(kernels: Library) -> None:
    gate_up, down = normal(4, 16, 8, dtype=torch.float32), normal(4, 8, 8, dtype=torch.float32)
    order = torch.tensor([2, 0, 3, 1])
    x, ids = (
        normal(5, 8, dtype=torch.float32),
        torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [0, 3]]),
    )
    weights = torch.full((5, 2), 0.5)
    plain, moved = (
        (
            PackedWeight.pack(g.clone(), kernels, is_paired=True),
            PackedWeight.pack(d.clone(), kernels),
        )
        for g, d in ((gate_up, down), (gate_up[order], down[order]))
    )
    expected = moe_cpu(x, ids, weights, *plain, "silu")
    assert torch.equal(moe_cpu(x, ids, weights, *moved, "silu", order.argsort()), expected)


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.empty(4, 3, dtype=torch.bfloat16))
    assert can_pack(torch.empty(4, 3))
    assert not can_pack(torch.empty(4, 4, dtype=torch.float16))
    assert not can_pack(torch.empty(4, 4).T[:2])
    assert not can_pack(torch.empty(0, 4))
    assert linear_cpu(torch.ones(1, 2), torch.ones(2, 2)) is None
