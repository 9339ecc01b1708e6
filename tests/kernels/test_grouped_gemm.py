"""Products of rows with their experts' weights, in every format, for skewed and empty experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_serve.kernels import gemm
from moe_serve.kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_activation_torch,
    grouped_gemm_activation_triton,
    grouped_gemm_torch,
    grouped_gemm_triton,
)
from moe_serve.kernels.quantization import Fp8Weight, Mxfp4Weight, Weight, quantize_rows_torch
from moe_serve.kernels.silu_mul import gated_activation_torch, gated_activation_triton
from moe_serve.kernels.targets import Target

# Rows that overflow are here on purpose; on the CPU, numpy tells of it.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

# Shapes: R rows sorted by expert, D in, N out, E experts.

DTYPES = (torch.float32, torch.float16)
COUNTS = ([0, 0, 0], [0, 1, 0], [17, 0, 66])
FORMATS = ("plain", "fp8", "mxfp4")


@pytest.fixture(params=[True, False], ids=["descriptors and fp8", "neither"])
def _target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which tiles are read and fp8 is multiplied."""
    if request.param:
        return
    real = gemm.target_of

    def without(x: Tensor) -> Target:
        return dataclasses.replace(real(x), has_descriptors=False, has_fp8=False)

    monkeypatch.setattr(gemm, "target_of", without)


def fp8_weight(rng: torch.Generator, experts: int, rows: int, width: int) -> Fp8Weight:
    data = torch.randn(experts, rows, width, generator=rng).clamp(-4, 4).to(torch.float8_e4m3fn)
    blocks = experts, -(-rows // 128), -(-width // 128)
    return Fp8Weight(data, torch.rand(blocks, generator=rng) * 0.1 + 0.05)


def mxfp4_weight(rng: torch.Generator, experts: int, rows: int, width: int) -> Mxfp4Weight:
    shape = experts, rows, width // 32
    codes = torch.randint(0, 256, (*shape, 16), generator=rng)
    scales = torch.randint(120, 126, shape, generator=rng)
    return Mxfp4Weight(codes.to(torch.uint8), scales.to(torch.uint8))


def made(
    kind: str, experts: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Weight:
    rng = torch.Generator().manual_seed(rows)
    if kind == "fp8":
        fp8 = fp8_weight(rng, experts, rows, width)
        return Fp8Weight(fp8.data_END.to(device), fp8.scales.to(device))
    if kind == "mxfp4":
        mx = mxfp4_weight(rng, experts, rows, width)
        return Mxfp4Weight(mx.blocks.to(device), mx.scales.to(device))
    return (torch.randn(experts, rows, width, generator=rng) * 0.1).to(device, dtype)


def reference(x_RD: Tensor, weight: Weight, counts: list[int]) -> Tensor:
    """One row after the other, in fp64."""
    rows = quantize_rows_torch(x_RD).dequantize() if isinstance(weight, Fp8Weight) else x_RD
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    products = [
        (weight[e] if isinstance(weight, Tensor) else weight.dequantize(e)).double() @ row.double()
        for row, e in zip(rows, owners, strict=True)
    ]
    return torch.stack(products) if products else x_RD.new_empty((0, weight.shape[1])).double()


def close(told: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(told.double(), expected.double(), atol=tolerance, rtol=tolerance)


def cases() -> list[tuple[str, torch.dtype]]:
    # 4-bit weights meet rows of 16 bits.
    return [case for case in itertools.product(FORMATS, DTYPES) if case != ("mxfp4", DTYPES[0])]


@pytest.mark.parametrize(("kind", "dtype"), cases())
@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 7, 29]])
def test_the_twin_gives_each_row_its_own_expert(
    kind: str, dtype: torch.dtype, counts: list[int], device: torch.device
) -> None:
    x = torch.randn(sum(counts), 160, device=device).to(dtype)
    weight = made(kind, 3, 40, 160, dtype, device)
    told = grouped_gemm_torch(x, weight, torch.tensor(counts, device=device))
    close(told, reference(x, weight, counts), dtype)


@pytest.mark.usefixtures("_target")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("kind", "dtype"), cases())
def test_the_kernel_matches_its_twin(
    kind: str, dtype: torch.dtype, counts: list[int], device: torch.device
) -> None:
    """With a bias, with rows that go elsewhere, and with rows past the last expert's."""
    torch.manual_seed(0)
    num_rows = sum(counts)
    x = torch.randn(num_rows + 3, 160, device=device).to(dtype)
    bias = torch.randn(3, 70, device=device).to(dtype)
    counts_E = torch.tensor(counts, device=device)
    weight = made(kind, 3, 70, 160, dtype, device)
    to_R = torch.randperm(num_rows + 3, device=device)
    told = grouped_gemm_triton(x, weight, counts_E, bias_EN=bias, scatter_R=to_R)
    expected = grouped_gemm_torch(x, weight, counts_E, bias_EN=bias, scatter_R=to_R)
    assert told.dtype == dtype and told.shape == expected.shape
    close(told[to_R[:num_rows]], expected[to_R[:num_rows]], dtype)
    close(grouped_gemm_torch(x, weight, counts_E, bias_EN=bias), expected[to_R], dtype)

    told = grouped_gemm_activation_triton(x, weight, counts_E, "silu", bias_EG=bias)
    expected = grouped_gemm_activation_torch(x, weight, counts_E, "silu", bias_EG=bias)
    assert told.dtype == dtype and told.shape == (num_rows + 3, 35)
    close(told[:num_rows], expected[:num_rows], dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_those_of_the_op_after_the_product(
    activation: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, counts_E = torch.randn(9, 64, device=device), torch.tensor([4, 5], device=device)
    weight = torch.randn(2, 24, 64, device=device)
    product = grouped_gemm_torch(x, weight, counts_E)
    expected = gated_activation_torch(product, activation)
    assert torch.equal(grouped_gemm_activation_torch(x, weight, counts_E, activation), expected)
    told = grouped_gemm_activation_triton(x, weight, counts_E, activation)
    torch.testing.assert_close(told, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate_and_up_are_rounded_before_they_meet(activation: str, device: torch.device) -> None:
    torch.manual_seed(0)
    x, counts_E = torch.randn(9, 64, device=device).half(), torch.tensor([4, 5], device=device)
    weight = torch.randn(2, 96, 64, device=device).half() * 0.1
    product = grouped_gemm_triton(x, weight, counts_E)
    told = grouped_gemm_activation_triton(x, weight, counts_E, activation)
    assert torch.equal(told, gated_activation_triton(product, activation))


@pytest.mark.usefixtures("_target")
def test_each_block_of_fp8_has_its_own_scale(device: torch.device) -> None:
    """Three blocks of weight rows by two of K; up begins inside of the second."""
    torch.manual_seed(0)
    counts = [2, 0, 3]
    weight = made("fp8", 3, 280, 160, torch.float32, device)
    assert isinstance(weight, Fp8Weight)
    weight.scales.copy_(0.01 * 2.0 ** torch.randint(0, 6, weight.scales.shape))
    x, counts_E = torch.randn(5, 160, device=device), torch.tensor(counts, device=device)
    expected = reference(x, weight, counts)
    close(grouped_gemm_triton(x, weight, counts_E), expected, torch.float32)
    close(grouped_gemm_torch(x, weight, counts_E), expected, torch.float32)
    told = grouped_gemm_activation_triton(x, weight, counts_E, "silu")
    close(told, gated_activation_torch(expected.float(), "silu"), torch.float32)


def test_an_unknown_activation_is_refused(device: torch.device) -> None:
    x, counts_E = torch.randn(2, 16, device=device), torch.tensor([2], device=device)
    weight = torch.randn(1, 8, 16, device=device)
    for op in (grouped_gemm_activation_triton, grouped_gemm_activation_torch):
        with pytest.raises(ValueError, match="'swish'"):
            op(x, weight, counts_E, "swish")


Op = Callable[[Tensor, Weight, Tensor], Tensor]


def with_silu(x_RD: Tensor, weight: Weight, counts_E: Tensor) -> Tensor:
    return grouped_gemm_activation_triton(x_RD, weight, counts_E, "silu")


@pytest.mark.parametrize("op", [grouped_gemm_triton, with_silu])
@pytest.mark.parametrize(("kind", "dtype"), cases())
def test_a_row_has_the_same_bits_in_any_company(
    kind: str, dtype: torch.dtype, op: Op, device: torch.device
) -> None:
    """Alone, among few and many, wherever it stands; others' rows may hold anything."""
    torch.manual_seed(0)
    weight = made(kind, 2, 26, 128, dtype, device)
    x = torch.randn(300, 128, device=device).to(dtype)
    whole = op(x, weight, torch.tensor([0, 300], device=device))
    for count in (1, 17, 129):
        for start in (7, 300 - count):
            own = x[start : start + count]
            alone = op(own, weight, torch.tensor([0, count], device=device))
            assert torch.equal(alone, whole[start : start + count]), (count, start)
            others = torch.full((5, 128), 3e4, device=device, dtype=dtype)
            rows = torch.cat((others, own, torch.full_like(own, float("inf"))[:1]))
            mixed = op(rows, weight, torch.tensor([5, count], device=device))
            assert torch.equal(mixed[5 : 5 + count], alone), (count, start)


def test_the_twin_gives_a_row_the_same_bits_in_any_company(device: torch.device) -> None:
    torch.manual_seed(0)
    for counts in ([0, 300, 0], [1, 17, 129]):
        x, weight = torch.randn(sum(counts), 24), torch.randn(3, 40, 24)
        whole = grouped_gemm(x, weight, torch.tensor(counts))
        owners = torch.arange(3).repeat_interleave(torch.tensor(counts))
        for row in range(0, len(x), 5):
            one = (torch.arange(3) == owners[row]).int()
            assert torch.equal(grouped_gemm(x[row : row + 1], weight, one)[0], whole[row])


def test_rows_past_the_last_experts_are_zeros_in_the_twin(device: torch.device) -> None:
    x, weight = torch.ones(5, 16, device=device), torch.ones(2, 8, 16, device=device)
    told = grouped_gemm_torch(x, weight, torch.tensor([1, 2], device=device))
    assert told[:, 0].tolist() == [16, 16, 16, 0, 0]


def test_a_bank_without_experts(device: torch.device) -> None:
    x, weight = torch.ones(0, 16, device=device), torch.ones(0, 8, 16, device=device)
    counts_E = torch.zeros(0, dtype=torch.int64, device=device)
    for op in (grouped_gemm_triton, grouped_gemm_torch):
        assert op(x, weight, counts_E).shape == (0, 8)
