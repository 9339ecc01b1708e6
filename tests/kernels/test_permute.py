"""Sorting by expert: stable, whole, and the same from every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.kernels import row_tiles
from moe_serve.kernels.permute import Permutation, permute_torch, permute_triton

OPS = [permute_triton, permute_torch]


def simple_permutation(ids_TK: Tensor, num_experts: int) -> Permutation:
    ids = [num_experts if expert < 0 else expert for expert in ids_TK.flatten().tolist()]
    order = sorted(range(len(ids)), key=lambda item: ids[item])
    inverse = [0] * len(ids)
    for row, item in enumerate(order):
        inverse[item] = row
    counts = [ids.count(expert) for expert in range(num_experts)]
    parts = (torch.tensor(part, dtype=torch.int64) for part in (order, inverse, counts))
    return Permutation(*(part.to(ids_TK.device) for part in parts))


def skewed_ids(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """Some experts have no token, half of the choices are one expert's, some are nobody's."""
    ids_TK = torch.randint(-1, (num_experts + 1) // 2, (num_tokens, top_k), device=device)
    return ids_TK.where(torch.rand(num_tokens, top_k, device=device) < 0.5, num_experts - 1)


def check(op: Any, ids_TK: Tensor, num_experts: int) -> None:
    for mine, expected in zip(
        op(ids_TK, num_experts), simple_permutation(ids_TK, num_experts), strict=True
    ):
        assert mine.dtype == torch.int64 and torch.equal(mine, expected)


@pytest.mark.parametrize("op", OPS)
def test_example(device: torch.device, op: Any) -> None:
    order, inverse, counts = op(torch.tensor([[2, 0], [0, 1]], device=device), 3)
    assert order.tolist() == [1, 2, 3, 0]
    assert inverse.tolist() == [3, 0, 1, 2]
    assert counts.tolist() == [2, 1, 1]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 129])
@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 1), (2, 8), (3, 60)])
def test_awkward_sizes(
    device: torch.device, op: Any, num_tokens: int, top_k: int, num_experts: int
) -> None:
    torch.manual_seed(num_tokens)
    check(op, skewed_ids(num_tokens, top_k, num_experts, device), num_experts)


@pytest.mark.parametrize("num_tokens", [257, 600])
@pytest.mark.parametrize("num_experts", [1, 13, 130])
def test_more_items_than_one_launch_places(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_experts: int
) -> None:
    monkeypatch.setattr(row_tiles, "AT_ONCE", 256)
    torch.manual_seed(0)
    check(permute_triton, skewed_ids(num_tokens, 1, num_experts, device), num_experts)


@pytest.mark.parametrize("expert", [-1, 0, 4])
@pytest.mark.parametrize("op", OPS)
def test_all_tokens_to_one_expert_or_none(device: torch.device, op: Any, expert: int) -> None:
    check(op, torch.full((70, 2), expert, device=device), 5)
