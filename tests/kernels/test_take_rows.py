from __future__ import annotations

import pytest
import torch

from moe_serve.kernels.take_rows import take_rows_torch, take_rows_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "width"), [(0, 2, 16), (1, 1, 13), (7, 3, 2048), (17, 8, 1)]
)
def test_each_row_is_its_tokens(
    device: torch.device, num_tokens: int, top_k: int, width: int, dtype: torch.dtype
) -> None:
    # Columns of something wider, as the tokens of other layers are.
    x_TD = torch.randn(num_tokens, width + 3, device=device).to(dtype)[:, :width]
    order_R = torch.randperm(num_tokens * top_k, device=device)[: num_tokens * top_k - 1]
    for op in (take_rows_triton, take_rows_torch):
        rows_RD = op(x_TD, order_R, top_k)
        assert rows_RD.shape == (len(order_R), width) and rows_RD.dtype == dtype
        for row, pair in zip(rows_RD, order_R.tolist(), strict=True):
            assert torch.equal(row, x_TD[pair // top_k])
