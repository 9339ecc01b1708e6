"""Products with weights of 8 and 4 bits: the bits that their definition gives, with every
instruction set, for a row alone and in company.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from moe_serve.kernels.combine import weigh_rows_torch
from moe_serve.kernels.cpu.library import Library
from moe_serve.kernels.cpu.products import (
    grouped_gemm_activation_cpu,
    grouped_gemm_cpu,
    linear_activation_cpu,
    linear_cpu,
    moe_cpu,
)
from moe_serve.kernels.cpu.quantized import INT4, INT8, QuantizedWeight, Scheme, can_quantize
from moe_serve.kernels.permute import permute_torch
from moe_serve.kernels.silu_mul import gated_activation_torch
from moe_serve.kernels.take_rows import take_rows_torch

# Shapes: T tokens, R rows, N rows of a weight, K columns, G groups of columns.

Array = npt.NDArray[np.float32]
SCHEMES = [INT8, INT4, Scheme(8, 32), Scheme(4, 32)]
# Narrower than a vector, ragged, more than two blocks; groups that end early.
SIZES = [(1, 32), (17, 96), (130, 128), (70, 1024 + 32), (64, 8)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * shape[-1] ** -0.5).to(dtype)


class Codes(NamedTuple):
    """value = (code - zero) * scale; zeros and scales [N, G], a scale for each row in one group."""

    codes_NK: npt.NDArray[np.int64]
    zeros_NG: npt.NDArray[np.int64]
    scales_NG: Array
    group: int

    @classmethod
    def of(cls, weight_NK: Array, scheme: Scheme) -> Codes:
        """By the definition of rounding to nearest."""
        if scheme.bits == 8:
            most = np.abs(weight_NK).max(1, keepdims=True)
            codes = np.rint(weight_NK * (np.float32(127) / most)).astype(np.int64) + 128
            return cls(codes, np.full_like(codes[:, :1], 128), most / np.float32(127), scheme.group)
        parts = [cls._of_group(part) for part in split(weight_NK, scheme.group)]
        return cls(
            *(np.concatenate(each, axis=1) for each in zip(*parts, strict=True)), scheme.group
        )

    @staticmethod
    def _of_group(part: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale = ((high - low) / np.float32(15)).astype(np.float16).astype(np.float32)[:, None]
        factor = np.float32(1) / scale
        zero = np.clip(np.rint(-low[:, None] * factor), 0, 15)
        codes = np.clip(np.rint(part * factor) + zero, 0, 15)
        return codes.astype(np.int64), zero.astype(np.int64), scale

    def values(self) -> Array:
        width = self.codes_NK.shape[1]
        zeros, scales = (
            each.repeat(width if each.shape[1] == 1 else self.group, 1)[:, :width]
            for each in (self.zeros_NG, self.scales_NG)
        )
        return (self.codes_NK - zeros).astype(np.float32) * scales

    def product(self, x_TK: Array) -> Array:
        """Exact sums within a group, one rounding for each group; fused steps are taken in fp64."""
        total = np.zeros((len(x_TK), len(self.codes_NK)), np.float32)
        is_by_row = self.scales_NG.shape[1] == 1 and self.zeros_NG[0, 0] == 128
        for g, (x, w) in enumerate(
            zip(split(x_TK, self.group), split(self.codes_NK, self.group), strict=True)
        ):
            most = np.abs(x).max(1, keepdims=True)
            rounded = np.rint(x * (np.float32(127) / most)).astype(np.int64)
            column = 0 if is_by_row else g
            sums = (rounded @ (w - self.zeros_NG[:, column : column + 1]).T).astype(np.float64)
            scales = most / np.float32(127)
            if not is_by_row:
                scales = self.scales_NG[:, g] * scales
            total = (sums * scales.astype(np.float64) + total).astype(np.float32)
        return total * self.scales_NG[:, 0] if is_by_row else total


def split(x_RK: npt.NDArray, group: int) -> list[npt.NDArray]:  # type: ignore[type-arg]
    return np.split(x_RK, range(group, x_RK.shape[1], group), axis=1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_product_has_the_bits_of_its_definition(
    kernels: Library, scheme: Scheme, size: tuple[int, int]
) -> None:
    weight = normal(*size)
    quantized = QuantizedWeight.quantize(weight, scheme, kernels)
    codes = Codes.of(weight.numpy(), scheme)
    assert np.array_equal(quantized.dequantize().numpy(), codes.values())
    x = normal(13, size[1], seed=1) * 8
    found = linear_cpu(x, quantized)
    assert found is not None
    assert np.array_equal(found.numpy(), codes.product(x.numpy()))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_bf16_is_rounded_at_the_end_only(kernels: Library, scheme: Scheme) -> None:
    weight, x = normal(130, 160, dtype=torch.bfloat16), normal(7, 160, dtype=torch.bfloat16, seed=1)
    found = linear_cpu(x, QuantizedWeight.quantize(weight, scheme, kernels))
    wide = linear_cpu(x.float(), QuantizedWeight.quantize(weight.float(), scheme, kernels))
    assert found is not None and wide is not None and torch.equal(found, wide.bfloat16())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(kernels: Library, scheme: Scheme) -> None:
    weight = QuantizedWeight.quantize(normal(70, 136, dtype=torch.bfloat16), scheme, kernels)
    x, bias = normal(201, 136, dtype=torch.bfloat16, seed=1), normal(70, dtype=torch.bfloat16)
    found = linear_cpu(x, weight, bias)
    assert found is not None
    for rows in (slice(0, 1), slice(3, 5), slice(7, 24), slice(100, 133), slice(0, 0)):
        alone = linear_cpu(x[rows].clone(), weight, bias)
        assert alone is not None and torch.equal(alone, found[rows])
    apart = linear_cpu(torch.cat((x, x), dim=1)[:, 136:], weight, bias)
    kernels.num_threads = 1
    again = linear_cpu(x, weight, bias)
    assert again is not None and apart is not None
    assert torch.equal(again, found) and torch.equal(apart, found)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_values_differ_by_half_a_step_at_most(kernels: Library, scheme: Scheme) -> None:
    weight = normal(3, 130, 160, seed=2)
    # Groups on one side of zero, one of zeros, one of one number, and one large number.
    weight[0, :50] += 10
    weight[1, 5], weight[1, 6], weight[1, 7, 3] = 0.0, -0.25, 100.0
    for is_paired in (False, True):
        quantized = QuantizedWeight.quantize(weight, scheme, kernels, is_paired=is_paired)
        error = (quantized.dequantize() - weight).abs()
        if scheme.bits == 8:
            step = weight.abs().amax(-1, keepdim=True) / 127
            assert (error <= step * 0.5001).all()
            continue
        for part, wrong in zip(
            weight.split(scheme.group, -1), error.split(scheme.group, -1), strict=True
        ):
            step = (part.amax(-1).clamp(min=0) - part.amin(-1).clamp(max=0)) / 15
            # A zero is one of the steps, and a scale has 11 bits: the ends may be half a step off.
            assert (wrong <= step[..., None] * 1.01).all()
    assert quantized.data.shape[0] == 3 and quantized.shape == weight.shape


def test_eight_bits_are_near_what_all_bits_give(kernels: Library) -> None:
    weight, x = normal(96, 512), normal(9, 512, seed=1) * 6
    exact = x @ weight.T
    for scheme, most in ((INT8, 0.015), (INT4, 0.12), (Scheme(4, 32), 0.1)):
        found = linear_cpu(x, QuantizedWeight.quantize(weight, scheme, kernels))
        assert found is not None
        assert 0.0 < (found - exact).norm() / exact.norm() < most


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=str)
def test_nan_and_infinity_come_through(kernels: Library, scheme: Scheme) -> None:
    weight = normal(70, 160)
    weight[3, 5], weight[4, 150] = float("nan"), float("inf")
    quantized = QuantizedWeight.quantize(weight, scheme, kernels)
    x = torch.ones(4, 160)
    x[1], x[2, 7], x[3, 151] = 0.0, float("nan"), float("-inf")
    found = linear_cpu(x, quantized)
    assert found is not None
    is_finite = found.isfinite()
    assert not is_finite[0, 3:5].any() and is_finite[0].sum() == 68
    assert not is_finite[2:].any()
    # Zeros, and what is as good as zero.
    assert (found[1, 5:] == 0).all()
    tiny = linear_cpu(torch.full((1, 160), 1e-35), quantized)
    assert tiny is not None and (tiny[0, 5:] == 0).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=str)
def test_gate_and_up_are_one_product(kernels: Library, scheme: Scheme, activation: str) -> None:
    for inner in (1, 17, 80):
        weight, x = normal(2 * inner, 48), normal(19, 48, seed=1) * 6
        paired = QuantizedWeight.quantize(weight, scheme, kernels, is_paired=True)
        found = linear_activation_cpu(x, paired, activation)
        gate_up = linear_cpu(x, QuantizedWeight.quantize(weight, scheme, kernels))
        assert gate_up is not None
        torch.testing.assert_close(
            found, gated_activation_torch(gate_up, activation), rtol=3e-5, atol=3e-5
        )
        assert torch.equal(paired.unpacked(kernels), paired.dequantize())


@pytest.mark.parametrize("routing", ["uniform", "one expert", "padded"])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=str)
def test_the_whole_layer_has_the_bits_of_its_parts(
    kernels: Library, scheme: Scheme, routing: str
) -> None:
    experts, top_k, hidden, inner = 6, 2, 72, 40
    gate_up = QuantizedWeight.quantize(
        normal(experts, 2 * inner, hidden, dtype=torch.bfloat16), scheme, kernels, is_paired=True
    )
    down = QuantizedWeight.quantize(
        normal(experts, hidden, inner, dtype=torch.bfloat16, seed=1), scheme, kernels
    )
    for tokens in (1, 7, 129):
        rng = torch.Generator().manual_seed(tokens)
        ids = torch.rand(tokens, experts, generator=rng).topk(top_k).indices
        weights = torch.rand(tokens, top_k, generator=rng)
        if routing == "one expert":
            ids = torch.tensor([[4, 1]]).repeat(tokens, 1)
        if routing == "padded":
            ids[-1], weights[-1] = -1, 0.0
        x = normal(tokens, hidden, dtype=torch.bfloat16, seed=2) * 6
        found = moe_cpu(x, ids, weights, gate_up, down, "silu")
        assert torch.equal(found, by_parts(x, ids, weights, gate_up, down))
        assert torch.equal(found[:1], moe_cpu(x[:1], ids[:1], weights[:1], gate_up, down, "silu"))


def by_parts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight
) -> Tensor:
    permutation = permute_torch(ids, gate_up.shape[0])
    rows = take_rows_torch(x, permutation.order_R, ids.shape[1])
    acts = grouped_gemm_activation_cpu(rows, gate_up, permutation.counts_E, "silu")
    assert acts is not None
    out = grouped_gemm_cpu(acts, down, permutation.counts_E)
    assert out is not None
    return weigh_rows_torch(out, permutation.inverse_R, weights)


def test_what_cannot_be_quantized() -> None:
    assert can_quantize(torch.empty(1, 8, dtype=torch.bfloat16))
    assert not can_quantize(torch.empty(4, 12))
    assert not can_quantize(torch.empty(4, 8, dtype=torch.float16))
    assert not can_quantize(torch.empty(8, 4).T)
    assert not can_quantize(torch.empty(0, 8))
