"""Choosing tokens from logits of a large vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kernel_bench.case import FP32, Case, Problem
from kernel_bench.inputs import against_twin, normal, size_of
from moe_serve.kernels.keep_top import keep_top
from moe_serve.kernels.sampling import fixed_point_weights, keep_min_p, pick

# Shapes: S rows, V vocabulary, 1 one value per row.

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = 0.8, 40, 0.9, 0.05


def cases(vocab_size: int, rows: Sequence[int]) -> Iterator[Case]:
    for op, make, limit in (
        ("fixed_point_weights", _weigh, 1e-5),
        ("pick", _pick, 0.0),
        ("keep_top", _keep_top, 0.0),
        ("keep_min_p", _keep_min_p, 0.0),
        ("temperature, softmax, multinomial", _whole, 0.0),
    ):
        for count in rows:
            yield Case(
                op=f"sampling: {op}",
                shape=f"vocabulary {vocab_size}",
                tokens=count,
                make=functools.partial(make, vocab_size, count),
                limit=limit,
                baseline="torch" if make is _whole else "eager twin",
                is_baseline_captured=False,
            )


def _logits(vocab_size: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[S, V], their maxima [S, 1] and temperatures [S, 1]."""
    logits_SV = normal(rows, vocab_size, device=device, dtype=FP32, scale=3.0)
    temperature_S1 = torch.full((rows, 1), _TEMPERATURE, dtype=FP32, device=device)
    return logits_SV, logits_SV.amax(-1, keepdim=True), temperature_S1


def _weigh(vocab_size: int, rows: int, device: torch.device, number: int) -> Problem:
    args = _logits(vocab_size, rows, device)
    return against_twin(fixed_point_weights, args, num_bytes=3 * size_of(args[0]))


def _pick(vocab_size: int, rows: int, device: torch.device, number: int) -> Problem:
    weights_SV = fixed_point_weights(*_logits(vocab_size, rows, device))
    return _like_twin(pick, weights_SV, _uniform(rows, device))


def _keep_min_p(vocab_size: int, rows: int, device: torch.device, number: int) -> Problem:
    weights_SV = fixed_point_weights(*_logits(vocab_size, rows, device))
    least_S1 = torch.full((rows, 1), _MIN_P, dtype=torch.float64, device=device)
    return _like_twin(keep_min_p, weights_SV, least_S1)


def _keep_top(vocab_size: int, rows: int, device: torch.device, number: int) -> Problem:
    inputs = _logits(vocab_size, rows, device)
    top_k_S = torch.full((rows,), _TOP_K, device=device)
    top_p_S = torch.full((rows,), _TOP_P, dtype=torch.float64, device=device)
    weights_SV = fixed_point_weights(*inputs)
    return _like_twin(keep_top, weights_SV, inputs[0], top_k_S, top_p_S)


def _like_twin(op: Callable[..., Tensor], *args: Tensor) -> Problem:
    """Integers: what the twin gives, exactly."""
    return against_twin(op, args, num_bytes=2 * size_of(args[0]))


def _whole(vocab_size: int, rows: int, device: torch.device, number: int) -> Problem:
    """A row without filters, from logits to token, against what torch has for it."""
    logits_SV, _, temperature_S1 = _logits(vocab_size, rows, device)
    uniform_S1 = _uniform(rows, device)

    def run() -> Tensor:
        max_S1 = logits_SV.amax(-1, keepdim=True)
        return pick(fixed_point_weights(logits_SV, max_S1, temperature_S1), uniform_S1)

    def check(found_S: Tensor) -> float:
        is_id = (found_S >= 0) & (found_S < vocab_size)
        return 0.0 if bool(is_id.all()) else float("inf")

    return Problem(
        run=run,
        check=check,
        flops=0,
        num_bytes=size_of(logits_SV),
        baseline=lambda: (logits_SV / temperature_S1).softmax(-1).multinomial(1),
    )


def _uniform(rows: int, device: torch.device) -> Tensor:
    return normal(rows, 1, device=device, dtype=torch.float64).sigmoid_()
