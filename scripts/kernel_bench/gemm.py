"""Products: experts of real models in their formats, and dense projections."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_bench.case import BF16, FP32, Case, Problem
from kernel_bench.inputs import choose_experts, normal, size_of, spread_evenly
from kernel_bench.shapes import Model
from moe_serve.bench.ruler import difference
from moe_serve.kernels.grouped_gemm import grouped_gemm, grouped_gemm_activation
from moe_serve.kernels.linear import linear
from moe_serve.kernels.quantization import (
    FP8_BLOCK,
    MX_BLOCK,
    Fp8Weight,
    Mxfp4Weight,
    Weight,
)

# Shapes: T tokens, R rows sorted by expert, D in, N out, E experts, F inner, G = 2F.

# Rows that meet fp8 weights are rounded to fp8 too.
LIMITS = {"bf16": 1e-2, "fp8": 6e-2, "mxfp4": 1e-2}
_MOST_CHECKED = 32
_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Matrix(NamedTuple):
    """One of an expert's two. `is_gated`: gate and up, and their activation in the same call."""

    name: str
    num_rows: int
    num_columns: int
    is_gated: bool


def matrices(model: Model) -> tuple[Matrix, Matrix]:
    hidden, inner = model.hidden_size, model.inner_size
    return (
        Matrix("gate, up, silu", 2 * inner, hidden, True),
        Matrix("down", hidden, inner, False),
    )


def cases(models: Sequence[Model], tokens: Sequence[int]) -> Iterator[Case]:
    for model in models:
        for storage in model.formats:
            for matrix in matrices(model):
                for count in tokens:
                    yield _grouped_case(model, storage, matrix, count)
    # Half of all rows at one expert in eleven or so.
    yield _grouped_case(models[0], "bf16", matrices(models[0])[0], tokens[-1], skew=1.0)
    for model in models:
        for name, (num_rows, width), dtype in projections(model):
            for count in tokens:
                if name != "head" or count <= 64:
                    yield _linear_case(model, name, num_rows, width, dtype, count)


def projections(model: Model) -> Iterator[tuple[str, tuple[int, int], torch.dtype]]:
    hidden, q_size = model.hidden_size, model.num_heads * model.head_dim
    yield "router", (model.num_experts, hidden), FP32
    if q_size:
        yield "qkv", (q_size + 2 * model.num_kv_heads * model.head_dim, hidden), BF16
        yield "output", (hidden, q_size), BF16
        yield "head", (model.vocab_size, hidden), BF16


def _grouped_case(
    model: Model, storage: str, matrix: Matrix, tokens: int, skew: float = 0.0
) -> Case:
    name = f"{model.name} {matrix.num_columns}->{matrix.num_rows}{model.share}"
    return Case(
        op=f"experts {storage}: {matrix.name}",
        shape=f"{name}, Zipf {skew:g}" if skew else name,
        tokens=tokens,
        make=functools.partial(_grouped, model, storage, matrix, tokens, skew),
        limit=LIMITS[storage],
        baseline="" if _grouped_mm is None else "grouped_mm bf16" + ", silu" * matrix.is_gated,
    )


def _linear_case(
    model: Model, name: str, num_rows: int, width: int, dtype: torch.dtype, tokens: int
) -> Case:
    return Case(
        op=f"linear {'fp32' if dtype == FP32 else 'bf16'}: {name}",
        shape=f"{model.name} {width}->{num_rows}",
        tokens=tokens,
        make=functools.partial(_linear, num_rows, width, dtype, tokens),
        limit=1e-2 if dtype == BF16 else 1e-5,
        baseline="matmul",
    )


class Rows(NamedTuple):
    """Rows of a step, sorted by expert. The lists are known on the host."""

    x_RD: Tensor
    counts_E: Tensor
    counts: list[int]
    experts: list[int]


def make_rows(
    model: Model, width: int, tokens: int, device: torch.device, skew: float = 0.0
) -> Rows:
    ids_TK = choose_experts(tokens, model.num_experts, model.top_k, skew)
    # A rank with a part of the experts gets the rows of these, and at least one.
    ids_R = (ids_TK % model.num_experts_here).flatten()
    ids_R = ids_R[: max(1, len(ids_R) * model.num_experts_here // model.num_experts)]
    counts_E = ids_R.bincount(minlength=model.num_experts_here)
    x_RD = normal(len(ids_R), width, device=device)
    return Rows(x_RD, counts_E.to(device), counts_E.tolist(), ids_R.sort().values.tolist())


@functools.lru_cache(maxsize=1)
def weights(
    num_experts: int, num_rows: int, num_columns: int, storage: str, device: torch.device
) -> Weight:
    shape, scale = (num_experts, num_rows, num_columns), num_columns**-0.5
    if storage == "bf16":
        return normal(*shape, device=device, scale=scale)
    if storage == "fp8":
        data = normal(*shape, device=device).to(torch.float8_e4m3fn)
        blocks = [-(-size // FP8_BLOCK) for size in shape[1:]]
        scales = normal(num_experts, *blocks, device=device, dtype=FP32).abs_().add_(0.5)
        return Fp8Weight(data, scales.mul_(scale))
    runs = (num_experts, num_rows, num_columns // MX_BLOCK)
    blocks = torch.randint(0, 256, (*runs, MX_BLOCK // 2), dtype=torch.uint8, device=device)
    return Mxfp4Weight(blocks, torch.randint(118, 122, runs, dtype=torch.uint8, device=device))


@functools.lru_cache(maxsize=1)
def dense_weights(
    num_experts: int, num_rows: int, num_columns: int, storage: str, device: torch.device
) -> Tensor:
    """The same values in bf16."""
    weight = weights(num_experts, num_rows, num_columns, storage, device)
    if isinstance(weight, Tensor):
        return weight
    dense = torch.empty(weight.shape, dtype=BF16, device=device)
    for expert in range(len(dense)):
        dense[expert] = weight.dequantize(expert)
    return dense


def forget() -> None:
    """Free the weights that cases share."""
    weights.cache_clear()
    dense_weights.cache_clear()


def _grouped(
    model: Model,
    storage: str,
    matrix: Matrix,
    tokens: int,
    skew: float,
    device: torch.device,
    number: int,
) -> Problem:
    rows = make_rows(model, matrix.num_columns, tokens, device, skew)
    key = (model.num_experts_here, matrix.num_rows, matrix.num_columns, storage, device)
    weight = weights(*key)
    num_used = sum(count > 0 for count in rows.counts)
    num_out = matrix.num_rows // (1 + matrix.is_gated)
    num_bytes = (
        stored_bytes(weight) * num_used / model.num_experts_here
        + size_of(rows.x_RD)
        + len(rows.experts) * num_out * rows.x_RD.element_size()
    )
    return Problem(
        run=lambda: multiply(rows.x_RD, weight, rows.counts_E, matrix.is_gated),
        check=lambda found: _error(found, rows, weight, matrix.is_gated),
        flops=2.0 * len(rows.experts) * matrix.num_rows * matrix.num_columns,
        num_bytes=num_bytes,
        baseline=_torch_grouped(rows, matrix.is_gated, key) if device.type == "cuda" else None,
    )


def multiply(x_RD: Tensor, weight: Weight, counts_E: Tensor, is_gated: bool) -> Tensor:
    if is_gated:
        return grouped_gemm_activation(x_RD, weight, counts_E, "silu")
    return grouped_gemm(x_RD, weight, counts_E)


def stored_bytes(weight: Weight) -> int:
    if isinstance(weight, Fp8Weight):
        return size_of(weight.data_END, weight.scales)
    if isinstance(weight, Mxfp4Weight):
        return size_of(weight.blocks, weight.scales)
    return size_of(weight)


def _torch_grouped(rows: Rows, is_gated: bool, key: tuple[Any, ...]) -> Callable[[], Tensor] | None:
    if _grouped_mm is None:
        return None
    weight_EDN = dense_weights(*key).transpose(1, 2)
    ends_E = rows.counts_E.cumsum(0).to(torch.int32)

    def run() -> Tensor:
        out: Tensor = _grouped_mm(rows.x_RD, weight_EDN, offs=ends_E)
        if is_gated:
            gate, up = out.chunk(2, dim=-1)
            out = F.silu(gate) * up
        return out

    return run


def _error(found_RN: Tensor, rows: Rows, weight: Weight, is_gated: bool) -> float:
    """Of some rows; all must be finite."""
    if not bool(found_RN.isfinite().all()):
        return float("inf")
    checked = spread_evenly(len(found_RN), _MOST_CHECKED)
    expected = []
    for row in checked:
        matrix_ND = _dequantized(weight, rows.experts[row])
        y_N = matrix_ND @ rows.x_RD[row].float()
        if is_gated:
            gate, up = y_N.chunk(2)
            y_N = F.silu(gate) * up
        expected.append(y_N)
    return difference(found_RN[checked], torch.stack(expected))


def _dequantized(weight: Weight, expert: int) -> Tensor:
    return weight[expert].float() if isinstance(weight, Tensor) else weight.dequantize(expert)


def _linear(
    num_rows: int, width: int, dtype: torch.dtype, tokens: int, device: torch.device, number: int
) -> Problem:
    x_TD = normal(tokens, width, device=device, dtype=dtype)
    weight_ND = normal(num_rows, width, device=device, dtype=dtype, scale=width**-0.5)
    return Problem(
        run=lambda: linear(x_TD, weight_ND),
        check=lambda found: _linear_error(found, x_TD, weight_ND),
        flops=2.0 * tokens * num_rows * width,
        num_bytes=size_of(x_TD, weight_ND) + tokens * num_rows * x_TD.element_size(),
        baseline=lambda: F.linear(x_TD, weight_ND),
    )


def _linear_error(found_TN: Tensor, x_TD: Tensor, weight_ND: Tensor) -> float:
    if not bool(found_TN.isfinite().all()):
        return float("inf")
    checked = spread_evenly(len(found_TN), _MOST_CHECKED)
    return difference(found_TN[checked], x_TD[checked].double() @ weight_ND.double().T)
