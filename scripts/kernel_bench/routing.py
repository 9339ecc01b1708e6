"""What surrounds the experts: choice of experts, sorting of rows, weighted sums."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_bench.case import FP32, Case, Problem
from kernel_bench.inputs import against_twin, choose_experts, normal, size_of, twin_of
from kernel_bench.shapes import Model
from moe_serve.bench.ruler import difference
from moe_serve.kernels.combine import weigh_rows
from moe_serve.kernels.permute import Permutation, permute
from moe_serve.kernels.topk_router import topk_router

# Shapes: T tokens, E experts, K top-k, R = T * K rows, D model.

# Of a thousand choices, those that may differ since two experts are as good but for rounding.
_MOST_DIFFERENT = 1e-3


def cases(models: Sequence[Model], tokens: Sequence[int]) -> Iterator[Case]:
    for model in models:
        routed = f"{model.name} {model.top_k} of {model.num_experts}"
        for count in tokens:
            yield Case(
                op="topk_router",
                shape=routed,
                tokens=count,
                make=functools.partial(_route, model, count),
                limit=1e-5,
                baseline="eager twin",
            )
            yield Case(
                op="permute",
                shape=routed,
                tokens=count,
                make=functools.partial(_permute, model, count),
                limit=0.0,
                baseline="eager twin",
            )
            yield Case(
                op="combine",
                shape=f"{routed}, D {model.hidden_size}",
                tokens=count,
                make=functools.partial(_combine, model, count),
                baseline="eager twin",
            )


def _route(model: Model, tokens: int, device: torch.device, number: int) -> Problem:
    logits_TE = normal(tokens, model.num_experts, device=device, dtype=FP32)
    router = model.router
    options: dict[str, Any] = {
        "score": router.score,
        "renormalize": router.renormalize,
        "scale": router.scale,
        "num_groups": router.num_groups,
        "top_groups": router.top_groups,
    }
    if router.has_bias:
        options["correction_bias_E"] = normal(
            model.num_experts, device=device, dtype=FP32, scale=0.1
        )
    load_CE = torch.zeros(1, model.num_experts, dtype=torch.int64, device=device)

    def check(found: tuple[Tensor, Tensor]) -> float:
        ids_TK, weights_TK = twin_of(topk_router)(logits_TE, model.top_k, **options)
        differs = (ids_TK != found[0]).double().mean()
        if float(differs) > _MOST_DIFFERENT or int(load_CE.sum()) != tokens * model.top_k:
            return float("inf")
        return difference(found[1], weights_TK)

    return Problem(
        run=lambda: topk_router(logits_TE, model.top_k, load_CE=load_CE, **options),
        check=check,
        flops=0,
        num_bytes=size_of(logits_TE, load_CE) + tokens * model.top_k * 12,
        baseline=lambda: twin_of(topk_router)(logits_TE, model.top_k, load_CE=load_CE, **options),
    )


def _permute(model: Model, tokens: int, device: torch.device, number: int) -> Problem:
    ids_TK = choose_experts(tokens, model.num_experts, model.top_k).to(device)
    num_bytes = 3 * size_of(ids_TK) + 8 * model.num_experts
    return against_twin(permute, (ids_TK, model.num_experts), num_bytes=num_bytes)


def _combine(model: Model, tokens: int, device: torch.device, number: int) -> Problem:
    ids_TK = choose_experts(tokens, model.num_experts, model.top_k)
    inverse_R = _inverse(ids_TK).to(device)
    rows_RD = normal(ids_TK.numel(), model.hidden_size, device=device)
    weights_TK = normal(*ids_TK.shape, device=device, dtype=FP32).abs_()
    out_bytes = tokens * model.hidden_size * rows_RD.element_size()
    num_bytes = size_of(rows_RD, inverse_R, weights_TK) + out_bytes
    return against_twin(weigh_rows, (rows_RD, inverse_R, weights_TK), num_bytes=num_bytes)


def _inverse(ids_TK: Tensor) -> Tensor:
    permutation: Permutation = twin_of(permute)(ids_TK, int(ids_TK.max()) + 1)
    return permutation.inverse_R
