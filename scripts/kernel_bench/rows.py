"""What works on rows alone: norms, rotation, gated activation, and writing keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_bench.attention import BLOCK_SIZE
from kernel_bench.case import BF16, Case, Problem
from kernel_bench.inputs import against_twin, normal, size_of
from kernel_bench.shapes import Model
from moe_serve.context import LayerKV
from moe_serve.kernels.kv_store import kv_store
from moe_serve.kernels.rms_norm import add_rms_norm, rms_norm
from moe_serve.kernels.rotary import rotary
from moe_serve.kernels.silu_mul import gated_activation

# Shapes: T tokens, D model, H heads, N kv heads, h head_dim, G = 2F, B blocks, s slots.

_EPS = 1e-6


def cases(models: Sequence[Model], tokens: Sequence[int]) -> Iterator[Case]:
    for model in models:
        width, inner = model.hidden_size, model.inner_size
        for count in tokens:
            yield _case("rms_norm", f"{model.name} {width}", count, _norm, width)
            yield _case("add_rms_norm", f"{model.name} {width}", count, _add_norm, width)
            yield _case("gated_activation", f"{model.name} {inner}", count, _activate, inner)
        if model.num_heads:
            heads = f"{model.name} {model.num_heads}/{model.num_kv_heads}x{model.head_dim}"
            for count in tokens:
                yield _case("rms_norm of heads", heads, count, _norm_heads, model)
                yield _case("rotary", heads, count, _rotate, model)
                yield _case("kv_store", heads, count, _store, model, "index_copy_")


def _case(
    op: str, shape: str, tokens: int, make: Any, of: object, baseline: str = "eager twin"
) -> Case:
    return Case(
        op=op,
        shape=shape,
        tokens=tokens,
        make=functools.partial(make, of, tokens),
        baseline=baseline,
    )


def _norm(width: int, tokens: int, device: torch.device, number: int) -> Problem:
    x_TD, weight_D = normal(tokens, width, device=device), normal(width, device=device)
    num_bytes = size_of(x_TD, x_TD, weight_D)
    return against_twin(rms_norm, (x_TD, weight_D, _EPS), num_bytes=num_bytes)


def _add_norm(width: int, tokens: int, device: torch.device, number: int) -> Problem:
    x_TD, y_TD, weight_D = (
        normal(*shape, device=device) for shape in ((tokens, width), (tokens, width), (width,))
    )
    num_bytes = 4 * size_of(x_TD) + size_of(weight_D)
    return against_twin(add_rms_norm, (x_TD, y_TD, weight_D, _EPS), num_bytes=num_bytes)


def _activate(inner: int, tokens: int, device: torch.device, number: int) -> Problem:
    gate_up_TG = normal(tokens, 2 * inner, device=device)
    num_bytes = 1.5 * size_of(gate_up_TG)
    return against_twin(gated_activation, (gate_up_TG, "silu"), num_bytes=num_bytes)


def _queries(model: Model, tokens: int, device: torch.device) -> Tensor:
    """[T, H, h] as it lies in a matrix of queries, keys and values."""
    num_heads = model.num_heads + 2 * model.num_kv_heads
    qkv = normal(tokens, num_heads, model.head_dim, device=device)
    return qkv[:, : model.num_heads]


def _norm_heads(model: Model, tokens: int, device: torch.device, number: int) -> Problem:
    q_THh = _queries(model, tokens, device)
    weight_h = normal(model.head_dim, device=device)
    num_bytes = size_of(q_THh, q_THh, weight_h)
    return against_twin(rms_norm, (q_THh, weight_h, _EPS), num_bytes=num_bytes)


def _rotate(model: Model, tokens: int, device: torch.device, number: int) -> Problem:
    q_THh = _queries(model, tokens, device)
    angles_Tr = normal(tokens, model.head_dim, device=device)
    args = (q_THh, angles_Tr.cos(), angles_Tr.sin())
    return against_twin(rotary, args, num_bytes=size_of(q_THh, q_THh, angles_Tr, angles_Tr))


def _store(model: Model, tokens: int, device: torch.device, number: int) -> Problem:
    """Into a pool twice as large, at random slots."""
    q_THh = _queries(model, tokens, device)
    k_TNh, v_TNh = (q_THh[:, i * model.num_kv_heads :][:, : model.num_kv_heads] for i in range(2))
    num_blocks = -(-2 * tokens // BLOCK_SIZE)
    shape = (num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    kv, expected = (
        LayerKV(
            keys_BsNh=torch.zeros(shape, dtype=BF16, device=device),
            values_BsNh=torch.zeros(shape, dtype=BF16, device=device),
        )
        for _ in range(2)
    )
    slots_T = torch.randperm(num_blocks * BLOCK_SIZE)[:tokens].to(device)

    def copy_by_torch() -> None:
        for rows, pool in ((k_TNh, expected.keys_BsNh), (v_TNh, expected.values_BsNh)):
            pool.flatten(0, 1).index_copy_(0, slots_T, rows)

    def check(found: None) -> float:
        copy_by_torch()
        is_equal = torch.equal(kv.keys_BsNh, expected.keys_BsNh)
        is_equal &= torch.equal(kv.values_BsNh, expected.values_BsNh)
        return 0.0 if is_equal else float("inf")

    return Problem(
        run=lambda: kv_store(k_TNh, v_TNh, kv, slots_T),
        check=check,
        flops=0,
        num_bytes=2 * size_of(k_TNh, v_TNh) + size_of(slots_T),
        baseline=copy_by_torch,
    )
