"""The router's kernel and its twin: the same experts, their weights, and every choice counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_serve.kernels.topk_router import topk_router_torch, topk_router_triton

# Shapes: T tokens, E experts, K top-k.

OPS = [topk_router_triton, topk_router_torch]
# E, K, groups, groups kept, score; renormalised but for K = 6.
KINDS = [
    (1, 1, 1, 1, "softmax"),
    (8, 2, 1, 1, "softmax"),
    (8, 2, 8, 4, "sigmoid"),
    (60, 4, 1, 1, "softmax"),
    (60, 6, 1, 1, "sigmoid"),
    (160, 6, 8, 3, "softmax"),
    (256, 8, 8, 4, "sigmoid"),
    (512, 17, 1, 1, "sigmoid"),
]


def simple_router(
    logits_TE: Tensor, top_k: int, *, score: str, renormalize: bool, scale: float,
    correction_bias_E: Tensor | None, num_groups: int, top_groups: int,
) -> tuple[list[list[int]], list[list[float]]]:  # fmt: skip
    """Row by row, in float64."""
    rows = logits_TE.double().cpu().numpy()
    bias = 0.0 if correction_bias_E is None else correction_bias_E.double().cpu().numpy()
    all_ids, all_weights = [], []
    for row in rows:
        exponentials = np.exp(row - row.max())
        scores = exponentials / exponentials.sum() if score == "softmax" else 1 / (1 + np.exp(-row))
        choice = scores + bias
        size = len(row) // num_groups
        groups = [sorted(choice[g * size : (g + 1) * size])[::-1] for g in range(num_groups)]
        best = 1 if correction_bias_E is None else 2
        worth = [sum(group[:best]) for group in groups]
        kept = sorted(range(num_groups), key=lambda g: -worth[g])[:top_groups]
        allowed = [e for e in range(len(row)) if e // size in kept]
        ids = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
        total = scores[ids].sum() if renormalize else 1.0
        all_ids.append(ids)
        all_weights.append((scores[ids] / total * scale).tolist())
    return all_ids, all_weights


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("num_experts", "top_k", "num_groups", "top_groups", "score"), KINDS)
def test_every_kind_of_router(
    device: torch.device, op: Any, num_experts: int, top_k: int, num_groups: int, top_groups: int,
    score: str,
) -> None:  # fmt: skip
    torch.manual_seed(num_experts)
    logits_TE = 3 * torch.randn(7, num_experts, device=device)
    bias_E = torch.randn(num_experts, device=device) - 3 if score == "sigmoid" else None
    options: dict[str, Any] = {
        "score": score, "renormalize": top_k != 6, "scale": 2.5, "correction_bias_E": bias_E,
        "num_groups": num_groups, "top_groups": top_groups,
    }  # fmt: skip
    load_CE = torch.full((3, num_experts), 5, device=device)
    phases_T = torch.tensor([2, 0, 0, 1, 2, 0, 2], dtype=torch.int32, device=device)
    ids_TK, weights_TK = op(logits_TE, top_k, **options, load_CE=load_CE, phases_T=phases_T)
    expected_ids, expected_weights = simple_router(logits_TE, top_k, **options)
    assert ids_TK.dtype == torch.int64 and weights_TK.dtype == torch.float32
    assert ids_TK.tolist() == expected_ids
    expected = torch.tensor(expected_weights, device=device)
    torch.testing.assert_close(weights_TK, expected, atol=1e-6, rtol=1e-5)
    for phase, load_E in enumerate(load_CE - 5):
        own_TK = ids_TK[phases_T == phase]
        assert torch.equal(load_E, torch.bincount(own_TK.flatten(), minlength=num_experts))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [0, 1, 19])
def test_padding_is_not_routed_and_not_counted(
    device: torch.device, op: Any, num_tokens: int
) -> None:
    logits_TE = torch.randn(num_tokens, 13, device=device)
    plain_ids, plain_weights = op(logits_TE, 3, score="softmax", renormalize=True)
    assert plain_ids.shape == plain_weights.shape == (num_tokens, 3)
    for num_valid in {0, 1, num_tokens // 2, num_tokens}:
        load_CE = torch.zeros(1, 13, dtype=torch.int64, device=device)
        valid_1 = torch.tensor([num_valid], dtype=torch.int32, device=device)
        ids_TK, weights_TK = op(
            logits_TE, 3, score="softmax", renormalize=True, load_CE=load_CE, num_valid_1=valid_1
        )
        assert torch.equal(ids_TK[:num_valid], plain_ids[:num_valid])
        assert torch.equal(weights_TK[:num_valid], plain_weights[:num_valid])
        assert (ids_TK[num_valid:] == -1).all() and (weights_TK[num_valid:] == 0).all()
        assert load_CE.sum() == 3 * min(num_valid, num_tokens)


@pytest.mark.parametrize("op", OPS)
def test_equal_scores_go_to_the_lowest_ids(device: torch.device, op: Any) -> None:
    logits_TE = torch.zeros(3, 24, device=device)
    logits_TE[1, 5] = 1.0
    logits_TE[2, ::2] = -0.0
    for groups in ({}, {"num_groups": 6, "top_groups": 2}):
        ids_TK, _ = op(logits_TE, 4, score="sigmoid", renormalize=False, **groups)
        expected = [[0, 1, 2, 3], [5, 0, 1, 2], [0, 1, 2, 3]]
        assert ids_TK.tolist() == expected


@pytest.mark.parametrize("op", OPS)
def test_groups_that_lost_win_nothing_when_all_scores_are_negative(
    device: torch.device, op: Any
) -> None:
    logits_TE = torch.tensor([[2.0, 1.9, 0.1, 0.0, -1.0, -1.1, 3.0, -4.0]], device=device)
    bias_E = torch.full((8,), -5.0, device=device)
    ids_TK, _ = op(
        logits_TE, 2, score="sigmoid", renormalize=True, correction_bias_E=bias_E, num_groups=4,
        top_groups=2,
    )  # fmt: skip
    assert sorted(ids_TK[0].tolist()) == [0, 1]
    is_interpreted = op is topk_router_triton and device.type == "cpu"
    logits_TE = torch.randn(100 if is_interpreted else 1000, 8, device=device)
    bias_E = 12 * torch.rand(8, device=device) - 6
    options: dict[str, Any] = {
        "score": "sigmoid", "renormalize": True, "scale": 1.0, "correction_bias_E": bias_E,
        "num_groups": 4, "top_groups": 2,
    }  # fmt: skip
    assert op(logits_TE, 2, **options)[0].tolist() == simple_router(logits_TE, 2, **options)[0]


@pytest.mark.parametrize("op", OPS)
def test_groups_that_do_not_divide_the_experts_are_refused(device: torch.device, op: Any) -> None:
    options: dict[str, Any] = {"score": "sigmoid", "renormalize": True}
    with pytest.raises(ValueError, match="10 experts do not divide into 4 groups"):
        op(torch.randn(3, 10, device=device), 2, num_groups=4, top_groups=2, **options)
    with pytest.raises(ValueError, match="'tanh'"):
        op(torch.randn(3, 10, device=device), 2, score="tanh", renormalize=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 33])
def test_logits_are_told_apart_that_bf16_would_round_together(
    device: torch.device, op: Any, num_rows: int
) -> None:
    logits_TE = torch.full((num_rows, 8), -1.0, device=device)
    logits_TE[:, 0], logits_TE[:, 1] = 1.0, 1.001953125
    assert op(logits_TE, 1, score="softmax", renormalize=True)[0].tolist() == [[1]] * num_rows


@pytest.mark.parametrize("op", OPS)
def test_the_scale_is_applied_once_to_the_weights(device: torch.device, op: Any) -> None:
    logits_TE = torch.randn(32, 8, device=device)
    plain, scaled = (
        op(logits_TE, 2, score="sigmoid", renormalize=True, scale=scale)[1] for scale in (1.0, 2.5)
    )
    assert torch.equal(scaled, plain * 2.5)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_rows_with_nan_get_experts_that_exist(device: torch.device, op: Any, score: str) -> None:
    logits_TE = torch.randn(6, 13, device=device)
    for row, value in enumerate((float("nan"), -float("nan"), float("inf"), -float("inf"))):
        logits_TE[row, ::2] = value
    logits_TE[4] = float("nan")
    load_CE = torch.zeros(1, 13, dtype=torch.int64, device=device)
    ids_TK, _ = op(logits_TE, 5, score=score, renormalize=True, load_CE=load_CE)
    for ids in ids_TK.tolist():
        assert len(set(ids)) == 5 and 0 <= min(ids) and max(ids) < 13
    assert load_CE.sum() == 6 * 5


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, score: str) -> None:
    logits_TE = torch.randn(23, 60, device=device)
    options: dict[str, Any] = {"score": score, "renormalize": True}
    ids_TK, weights_TK = topk_router_triton(logits_TE, 4, **options)
    for start, stop in ((0, 1), (3, 4), (5, 22)):
        ids, weights = topk_router_triton(logits_TE[start:stop], 4, **options)
        assert torch.equal(ids, ids_TK[start:stop])
        assert torch.equal(weights, weights_TK[start:stop])
