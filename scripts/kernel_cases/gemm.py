"""Products: experts and projections of real models, in every format."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernel_cases.case import Case
from moe_serve.kernels.grouped_gemm import grouped_gemm_activation_triton, grouped_gemm_triton
from moe_serve.kernels.linear import linear_triton
from moe_serve.kernels.quantization import (
    FP8_BLOCK,
    MX_BLOCK,
    Fp8Weight,
    Mxfp4Weight,
    Weight,
    quantize_rows_triton,
)
from moe_serve.kernels.tiles import FORMATS, Format


class Experts(NamedTuple):
    name: str
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    operands: Format
    has_bias: bool = False


MODELS = (
    Experts("Mixtral-8x7B", 8, 2, 4096, 14336, "16-bit"),
    Experts("Qwen3-30B-A3B", 128, 8, 2048, 768, "16-bit"),
    Experts("DeepSeek-V3", 256, 8, 7168, 2048, "fp8"),
    Experts("gpt-oss-120b", 128, 4, 2880, 2880, "mxfp4", has_bias=True),
)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(operands: Format, experts: int, rows: int, columns: int) -> Weight:
    if operands == "fp8":
        scales = experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        data = empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
        return Fp8Weight(data, empty(*scales, dtype=torch.float32))
    if operands == "mxfp4":
        scales = experts, rows, columns // MX_BLOCK
        uint8 = torch.uint8
        return Mxfp4Weight(empty(*scales, MX_BLOCK // 2, dtype=uint8), empty(*scales, dtype=uint8))
    dtype = torch.float32 if operands == "fp32" else torch.bfloat16
    return empty(experts, rows, columns, dtype=dtype)


def gate_up(model: Experts, num_rows: int) -> object:
    return grouped_gemm_activation_triton(
        rows(model.operands, num_rows, model.hidden),
        weight(model.operands, model.num_experts, 2 * model.inner, model.hidden),
        empty(model.num_experts, dtype=torch.int64),
        "silu",
        bias_EG=empty(model.num_experts, 2 * model.inner) if model.has_bias else None,
    )


def down(model: Experts, num_rows: int) -> object:
    return grouped_gemm_triton(
        rows(model.operands, num_rows, model.inner),
        weight(model.operands, model.num_experts, model.hidden, model.inner),
        empty(model.num_experts, dtype=torch.int64),
        bias_EN=empty(model.num_experts, model.hidden) if model.has_bias else None,
        scatter_R=empty(num_rows, dtype=torch.int64),
    )


def rows(operands: Format, num_rows: int, width: int) -> torch.Tensor:
    return empty(num_rows, width, dtype=torch.float32 if operands == "fp32" else torch.bfloat16)


def project(dtype: torch.dtype, num_rows: int, out: int, width: int, has_bias: bool) -> object:
    bias = empty(out, dtype=dtype) if has_bias else None
    return linear_triton(empty(num_rows, width, dtype=dtype), empty(out, width, dtype=dtype), bias)


def project_fp8(num_rows: int, out: int, width: int, has_bias: bool) -> object:
    bias = empty(1, out) if has_bias else None
    one = empty(1, dtype=torch.int64)
    x, weights = empty(num_rows, width), weight("fp8", 1, out, width)
    return grouped_gemm_triton(x, weights, one, bias_EN=bias)


def default() -> Iterator[Case]:
    for model in MODELS:
        for tokens in (1, 64, 4096):
            for call in (gate_up, down):
                name = f"{model.name} {call.__name__}, {tokens} tokens"
                yield Case(name, functools.partial(call, model, tokens * model.top_k), True)
    for tokens in (1, 4096):
        call = functools.partial(project, torch.bfloat16, tokens, 5120, 2048, False)
        yield Case(f"projection, {tokens} tokens", call, True)
    biased = functools.partial(project, torch.float16, 64, 5120, 2880, True)
    yield Case("projection with bias, 64 tokens", biased, True)
    router = functools.partial(
        linear_triton, empty(64, 2048), empty(128, 2048, dtype=torch.float32)
    )
    yield Case("router, 64 tokens", router)
    odd = functools.partial(project, torch.bfloat16, 64, 330, 50, False)
    yield Case("projection of 50 columns, 64 tokens", odd, True)
    quantize = functools.partial(quantize_rows_triton, empty(64, 7168))
    yield Case("quantize_rows, 64 tokens", quantize)


def everything() -> Iterator[Case]:
    """Row counts that reach each tile, through both ops and every format."""
    yield from default()
    for operands in FORMATS:
        for num_rows in (1, 17, 33, 65, 2048):
            for inner in (64, 8448, 16_896, 33_792, 1_000_000):
                yield from both(operands, num_rows, 2880, inner)
        if operands in ("16-bit", "fp32"):
            # Rows that are not aligned.
            yield from both(operands, 65, 50, 51)
    for num_rows in (1, 17, 33, 65, 1000, 2048):
        for columns in (64, 1000, 8448, 33_792):
            for has_bias in (True, False):
                name = f"{num_rows} rows, {columns} columns, bias {has_bias}"
                sizes = num_rows, columns, 2880, has_bias
                call = functools.partial(project, torch.bfloat16, *sizes)
                yield Case(f"projection, {name}", call, True)
                yield Case(f"fp8, {name}", functools.partial(project_fp8, *sizes), True)


def both(operands: Format, num_rows: int, width: int, columns: int) -> Iterator[Case]:
    name = f"{operands}, {num_rows} rows of {width}, {columns} columns"
    has_product = operands != "fp32"
    model = Experts(operands, 2, 1, width, columns, operands, has_bias=True)
    yield Case(f"{name}, gated", functools.partial(gate_up, model, num_rows), has_product)
    turned = model._replace(hidden=columns, inner=width)
    yield Case(name, functools.partial(down, turned, num_rows), has_product)
