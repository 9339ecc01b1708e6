"""The gated activation's kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from moe_serve.kernels.silu_mul import KINDS, gated_activation_torch, gated_activation_triton

# The interpreter rounds towards zero to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "inner"), [(0, 8), (1, 1), (7, 13), (3, 1100)])
def test_kernel_equals_its_twin(
    device: torch.device, num_rows: int, inner: int, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(0)
    # Rows that lie apart.
    gate_up_TG = 4 * torch.randn(num_rows, 2 * inner + 2, device=device).to(dtype)[:, 2:]
    extremes = torch.tensor([-3e4, -100.0, -20.0, -0.0, 0.0, 1e-7, 20.0, 100.0, 3e4], device=device)
    gate_up_TG[:1, : min(9, inner)] = extremes[:inner].to(dtype)
    out_TF = gated_activation_triton(gate_up_TG, kind)
    assert out_TF.shape == (num_rows, inner)
    expected_TF = gated_activation_torch(gate_up_TG, kind)
    torch.testing.assert_close(out_TF, expected_TF, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_unknown_kinds_are_named(device: torch.device) -> None:
    for op in (gated_activation_triton, gated_activation_torch):
        with pytest.raises(ValueError, match="relu6"):
            op(torch.zeros(1, 4, device=device), "relu6")
