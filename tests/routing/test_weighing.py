"""The order in which a token's slots are added."""

from __future__ import annotations

import pytest
import torch

from moe_serve.kernels.combine import weigh_rows, weigh_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_slots_are_added_one_by_one_in_fp32(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots_TKD, weights_TK = torch.randn(num_tokens, 8, 33).to(dtype), torch.rand(num_tokens, 8)
    expected_TD = torch.zeros(num_tokens, 33)
    for slot in range(8):
        expected_TD += slots_TKD[:, slot].float() * weights_TK[:, slot, None]
    assert torch.equal(weigh_slots(slots_TKD, weights_TK), expected_TD)

    inverse_R = torch.randperm(num_tokens * 8)
    rows_RD = torch.empty(num_tokens * 8, 33, dtype=dtype)
    rows_RD[inverse_R] = slots_TKD.view(-1, 33)
    assert torch.equal(weigh_rows(rows_RD, inverse_R, weights_TK), expected_TD.to(dtype))
