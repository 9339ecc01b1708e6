"""The kernels that choose tokens: exactly what their twins choose from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.keep_top import keep_top_torch, keep_top_triton
from moe_serve.kernels.sampling import (
    fixed_point_weights_torch,
    fixed_point_weights_triton,
    keep_min_p,
    log_normalizer_torch,
    log_normalizer_triton,
    pick_torch,
    pick_triton,
    weight_bits,
)

# Shapes: S rows, V vocabulary.

VOCAB_SIZES = [1, 13, 300, 2500]
INFINITY = float("inf")


def awkward_logits(vocab_size: int, device: torch.device) -> Tensor:
    """Plain, with many ties, all equal, with tokens that cannot be, with one that must be."""
    torch.manual_seed(vocab_size)
    logits_SV = 3 * torch.randn(5, vocab_size, device=device)
    logits_SV[1] = logits_SV[1].round()
    logits_SV[2] = -0.0
    logits_SV[2, ::2] = 0.0
    logits_SV[3, 1::2] = -INFINITY
    logits_SV[4, 1:] -= 60.0
    return logits_SV


def column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def weights_of(logits_SV: Tensor) -> Tensor:
    return fixed_point_weights_torch(logits_SV, logits_SV.amax(-1, keepdim=True))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_weights_and_their_sum(device: torch.device, vocab_size: int) -> None:
    logits_SV = awkward_logits(vocab_size, device)
    max_S1 = logits_SV.amax(-1, keepdim=True)
    one = 2 ** weight_bits(vocab_size)
    for temperature in (None, torch.rand(5, 1, device=device) + 0.1):
        weights_SV = fixed_point_weights_triton(logits_SV, max_S1, temperature)
        expected_SV = fixed_point_weights_torch(logits_SV, max_S1, temperature)
        assert weights_SV.dtype == torch.int64 and (weights_SV.amax(-1) == one).all()
        torch.testing.assert_close(
            weights_SV.double() / one, expected_SV.double() / one, atol=2**-42, rtol=2e-5
        )
    torch.testing.assert_close(
        log_normalizer_triton(logits_SV, max_S1),
        log_normalizer_torch(logits_SV, max_S1),
        atol=1e-6,
        rtol=1e-6,
    )


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES[:-1])
def test_top_k_and_top_p_keep_the_same_tokens(
    device: torch.device, vocab_size: int, shift: int
) -> None:
    # Each off, at its ends, and both at once.
    choices = [
        (vocab_size, 1.0), (vocab_size, 0.0), (vocab_size, 0.9), (max(1, vocab_size // 3), 1.0),
        (min(vocab_size, 50), 0.8),
    ]  # fmt: skip
    logits_SV = awkward_logits(vocab_size, device).roll(shift, 0)
    weights_SV = weights_of(logits_SV)
    top_k_S = torch.tensor([top_k for top_k, _ in choices], device=device)
    top_p_S = column([top_p for _, top_p in choices], device).squeeze(1)
    kept_SV = keep_top_triton(weights_SV, logits_SV, top_k_S, top_p_S)
    assert torch.equal(kept_SV, keep_top_torch(weights_SV, logits_SV, top_k_S, top_p_S))


def test_a_wider_row_than_a_program_sees_at_once(device: torch.device) -> None:
    logits_SV = awkward_logits(VOCAB_SIZES[-1], device)[:2]
    weights_SV = weights_of(logits_SV)
    top_k_S = torch.tensor([VOCAB_SIZES[-1], 700], device=device)
    top_p_S = torch.tensor([0.9, 0.97], dtype=torch.float64, device=device)
    kept_SV = keep_top_triton(weights_SV, logits_SV, top_k_S, top_p_S)
    assert torch.equal(kept_SV, keep_top_torch(weights_SV, logits_SV, top_k_S, top_p_S))


def test_tokens_that_are_kept_against_a_plain_sort(device: torch.device) -> None:
    logits_SV = awkward_logits(13, device)
    weights_SV = weights_of(logits_SV)
    top_k_S = torch.tensor([5, 4, 3, 13, 2], device=device)
    top_p_S = torch.tensor([0.9, 1.0, 0.5, 0.7, 1.0], dtype=torch.float64, device=device)
    kept_SV = keep_top_triton(weights_SV, logits_SV, top_k_S, top_p_S)
    for row in range(5):
        weights, logits = weights_SV[row].tolist(), logits_SV[row].tolist()
        best = sorted(range(13), key=lambda v, x=logits: (-x[v], v))[: int(top_k_S[row])]
        total, share, kept = sum(weights[v] for v in best), 0, [0] * 13
        for token in best:
            if not share or share < total * float(top_p_S[row]):
                kept[token] = weights[token]
            share += weights[token]
        assert kept_SV[row].tolist() == kept


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_same_token_is_picked(device: torch.device, vocab_size: int) -> None:
    weights_SV = weights_of(awkward_logits(vocab_size, device))
    weights_SV[0, : vocab_size // 2] = 0
    for uniforms in ([0.0] * 5, [1 - 2**-53] * 5, torch.rand(5).tolist()):
        uniform_S1 = column(uniforms, device)
        for min_p in (None, column([0.0, 0.1, 0.5, 1.0, 0.01], device)):
            ids_S = pick_triton(weights_SV, uniform_S1, min_p)
            assert ids_S.dtype == torch.int64
            assert torch.equal(ids_S, pick_torch(weights_SV, uniform_S1, min_p))
            left_SV = weights_SV if min_p is None else keep_min_p(weights_SV, min_p)
            assert (left_SV.gather(1, ids_S[:, None]) > 0).all() or vocab_size == 1


@pytest.mark.parametrize("op", [pick_triton, pick_torch])
def test_a_target_that_ends_a_block_takes_no_token_without_weight(
    device: torch.device, op: Any
) -> None:
    """Blocks are 2048 wide: half of the weight is in the first, the rest late in the second."""
    weights_SV = torch.zeros(1, 2100, dtype=torch.int64, device=device)
    weights_SV[0, [7, 2060]] = 4
    for uniform, token_id in ((0.0, 7), (0.49, 7), (0.5, 2060), (0.99, 2060)):
        assert op(weights_SV, column([uniform], device)).tolist() == [token_id]


@pytest.mark.parametrize("op", [keep_top_triton, keep_top_torch])
@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.25, 1), (0.3, 2), (0.5, 2), (0.51, 3)])
def test_the_least_tokens_whose_share_reaches_top_p(
    device: torch.device, op: Any, top_p: float, kept: int
) -> None:
    logits_SV = torch.tensor([[1.0, 4.0, 2.0, 3.0]], device=device)
    weights_SV = torch.ones(1, 4, dtype=torch.int64, device=device)
    top_k_S = torch.tensor([4], device=device)
    told = op(weights_SV, logits_SV, top_k_S, column([top_p], device).squeeze(1))
    assert told.tolist() == [[[0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 1, 1]][kept - 1]]


def test_no_rows(device: torch.device) -> None:
    logits_SV = torch.empty(0, 13, device=device)
    weights_SV = fixed_point_weights_triton(logits_SV, logits_SV[:, :1])
    empty_S = torch.empty(0, dtype=torch.int64, device=device)
    assert weights_SV.shape == (0, 13)
    assert keep_top_triton(weights_SV, logits_SV, empty_S, empty_S.double()).shape == (0, 13)
    assert pick_triton(weights_SV, empty_S[:, None].double()).shape == (0,)
