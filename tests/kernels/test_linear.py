"""Projections whose rows do not depend on the other rows of the call."""

from __future__ import annotations

import pytest
import torch

from moe_serve.kernels.linear import TILES, columns_agree, linear, linear_torch, linear_triton
from moe_serve.kernels.permute import permute

SHAPES = [(64, 33), (256, 512), (100, 1000)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "out"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(features: int, out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2 * TILES[-1] + 33, features).to(dtype)
    weight, bias = torch.randn(out, features).to(dtype), torch.randn(out).to(dtype)
    whole = linear(x, weight, bias)
    for count in (1, 2, 3, 7, 8, 15, 16, 17, 33, 129, 255, 256, 257, 300):
        assert torch.equal(linear(x[:count], weight, bias), whole[:count]), count
        assert torch.equal(linear(x[-count:], weight, bias), whole[-count:]), count


def cancelling(num_rows: int, features: int, out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sum is the rounding error of its order: unlike ordinary bf16, any other order shows."""
    half = features // 2
    order = torch.randperm(half)
    x, weight = torch.randn(num_rows, half), torch.randn(out, half)
    return torch.cat((x, x[:, order]), dim=1), torch.cat((weight, -weight[:, order]), dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [1, 3, 8, 17])
def test_weights_of_few_columns(out: int, dtype: torch.dtype) -> None:
    """Alone, on any place of a batch, and wherever in memory."""
    for features in (24, 34, 96, 258, 384):
        torch.manual_seed(0)
        x, weight = (part.to(dtype) for part in cancelling(40, features, out))
        whole = linear(x, weight)
        shifted = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x)
        for start, stop in ((0, 1), (5, 6), (7, 9), (3, 11), (13, 29), (8, 40)):
            for rows in (x, shifted):
                told = linear(rows[start:stop], weight)
                assert torch.equal(told, whole[start:stop]), (features, start, stop)


@pytest.mark.parametrize("dtype", DTYPES)
def test_part_of_the_columns(dtype: torch.dtype) -> None:
    """Where `columns_agree` says so, a rank's columns have the bits of the whole weight."""
    torch.manual_seed(0)
    for features, out in ((64, 24), (96, 90), (256, 321)):
        x, weight = (part.to(dtype) for part in cancelling(50, features, out))
        bias = torch.randn(out).to(dtype)
        for columns in (torch.arange(out)[:3], torch.arange(out)[out // 3 :: 2]):
            if columns_agree(columns, out, features, dtype):
                for part, all_of in ((None, None), (bias[columns], bias)):
                    told = linear(x, weight[columns], part)
                    assert torch.equal(told, linear(x, weight, all_of)[:, columns])


@pytest.mark.parametrize("count", [0, 1, 17, 300])
def test_values_are_those_of_a_plain_product(count: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(count, 70), torch.randn(50, 70), torch.randn(50)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias, atol=1e-4, rtol=1e-5)


def test_permute_gives_the_example_of_its_docstring() -> None:
    order, inverse, counts = permute(torch.tensor([[2, 0], [0, 1]]), 3)
    assert order.tolist() == [1, 2, 3, 0]
    assert inverse.tolist() == [3, 0, 1, 2]
    assert counts.tolist() == [2, 1, 1]


@pytest.mark.parametrize("features", [96, 70])
def test_the_kernel_matches_its_twin(device: torch.device, features: int) -> None:
    """70 features: rows that no descriptor takes."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        for count in (0, 1, 70):
            torch.manual_seed(count)
            x = torch.randn(count, features, device=device).to(dtype)
            weight = torch.randn(50, features, device=device).to(dtype)
            bias = torch.randn(50, device=device).to(dtype)
            for part in (None, bias):
                told = linear_triton(x, weight, part)
                expected = linear_torch(x.cpu(), weight.cpu(), None if part is None else bias.cpu())
                assert told.shape == (count, 50)
                torch.testing.assert_close(told.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("features", [528, 797])
def test_slices_of_k_are_added_once(device: torch.device, features: int) -> None:
    """Two and three of them, whose last is shorter; the bias is in one."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, features, device=device), torch.randn(20, features, device=device)
    bias = torch.randn(20, device=device) * 10
    expected = x.double() @ weight.double().T + bias.double()
    told = linear_triton(x, weight, bias).double()
    torch.testing.assert_close(told, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [96, 70])
def test_router_logits_are_not_rounded(
    device: torch.device, features: int, dtype: torch.dtype
) -> None:
    """Two experts that differ by less than one step of bf16, for few rows and many of any type."""
    weight = torch.full((4, features), -1.0, device=device)
    weight[:2] = 0.0
    weight[:2, 0] = 1.0
    weight[1, 1] = 2.0**-9
    for count in (1, 8, 9, 33):
        x = torch.zeros(count, features, device=device, dtype=dtype)
        x[:, :2] = 1.0
        for op in (linear_triton, linear_torch):
            logits = op(x, weight)
            assert logits.dtype == torch.float32
            assert logits[:, :2].tolist() == [[1.0, 1.001953125]] * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_gives_a_row_its_bits_in_any_batch(
    device: torch.device, dtype: torch.dtype
) -> None:
    """528 features: in fp32, two slices of K. 66: rows that no descriptor takes."""
    for num_rows, features in ((1030, 528), (70, 66)):
        torch.manual_seed(0)
        x, weight = (part.to(device, dtype) for part in cancelling(num_rows, features, 20))
        whole = linear_triton(x, weight)
        for count in (1, 17, 33, 65):
            assert torch.equal(linear_triton(x[:count], weight), whole[:count]), count
            assert torch.equal(linear_triton(x[-count:].clone(), weight), whole[-count:]), count
