"""The weighted sum: slots one by one in fp32, and nothing from slots without weight."""

from __future__ import annotations

import pytest
import torch

from moe_serve.kernels.combine import (
    weigh_rows_torch,
    weigh_rows_triton,
    weigh_slots_torch,
    weigh_slots_triton,
)

# Shapes: T tokens, K top-k, D model, R rows.

# The interpreter rounds towards zero to bf16.
TOLERANCE = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize(("top_k", "width"), [(1, 1), (4, 33), (2, 1100)])
def test_kernels_equal_their_twins(
    device: torch.device, num_tokens: int, top_k: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    # Slots that lie apart, as in a wider buffer.
    slots_TKD = torch.randn(num_tokens, top_k + 1, width, device=device).to(dtype)[:, 1:]
    weights_TK = torch.rand(num_tokens, top_k, device=device)
    expected_TD = weigh_slots_torch(slots_TKD, weights_TK)
    assert torch.equal(weigh_slots_triton(slots_TKD, weights_TK), expected_TD)
    apart_TK = torch.nn.functional.pad(weights_TK, (3, 2))[:, 3:-2]
    assert torch.equal(weigh_slots_triton(slots_TKD, apart_TK), expected_TD)

    inverse_R = torch.randperm(num_tokens * top_k, device=device)
    rows_RD = torch.empty(num_tokens * top_k, width, dtype=dtype, device=device)
    rows_RD[inverse_R] = slots_TKD.flatten(0, 1)
    out_TD = weigh_rows_triton(rows_RD, inverse_R, weights_TK)
    twin_TD = weigh_rows_torch(rows_RD, inverse_R, weights_TK)
    assert torch.equal(twin_TD, expected_TD.to(dtype))
    torch.testing.assert_close(out_TD, twin_TD, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_a_slot_without_weight_adds_nothing(device: torch.device, value: float) -> None:
    torch.manual_seed(0)
    slots_TKD = torch.randn(5, 3, 40, device=device)
    weights_TK = torch.rand(5, 3, device=device)
    for token in range(5):
        weights_TK[token, token % 3] = 0.0
        slots_TKD[token, token % 3] = 0.0
    expected_TD = weigh_slots_torch(slots_TKD, weights_TK)
    for token in range(5):
        slots_TKD[token, token % 3] = value
    identity_R = torch.arange(15, device=device)
    rows_RD = slots_TKD.flatten(0, 1)
    assert torch.equal(weigh_slots_torch(slots_TKD, weights_TK), expected_TD)
    assert torch.equal(weigh_slots_triton(slots_TKD, weights_TK), expected_TD)
    assert torch.equal(weigh_rows_torch(rows_RD, identity_R, weights_TK), expected_TD)
    assert torch.equal(weigh_rows_triton(rows_RD, identity_R, weights_TK), expected_TD)
