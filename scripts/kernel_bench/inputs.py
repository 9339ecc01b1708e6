"""Random inputs. On the device "meta" they have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernel_bench.case import BF16, Problem
from moe_serve.bench.ruler import difference

# Shapes: T tokens, E experts, K top-k.


def normal(
    *shape: int, device: torch.device, dtype: torch.dtype = BF16, scale: float = 1.0
) -> Tensor:
    """Zero mean, standard deviation `scale`."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device).mul_(scale)


def choose_experts(tokens: int, num_experts: int, top_k: int, skew: float = 0.0) -> Tensor:
    """[T, K] int64 on the CPU, distinct in a row: what is known of them costs no wait.

    `skew`: popularity falls with the expert's number, as in Zipf's law of that exponent.
    """
    popularity_E = -skew * torch.arange(1, num_experts + 1).float().log()
    gumbel_TE = -torch.empty(tokens, num_experts).exponential_().log()
    return (popularity_E + gumbel_TE).topk(top_k, dim=-1).indices


def spread_evenly(count: int, most: int) -> list[int]:
    """Up to `most` of the numbers 0 .. count - 1, first and last included."""
    return sorted(set(torch.linspace(0, count - 1, min(count, most)).long().tolist()))


def size_of(*tensors: Tensor | None) -> int:
    """Bytes of all of them."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def twin_of(op: Any) -> Any:
    """The plain PyTorch form of an op; the op itself where it has no kernel."""
    return getattr(op, "__wrapped__", op)


def against_twin(
    op: Callable[..., Any], args: Iterable[Any], *, num_bytes: float, **options: Any
) -> Problem:
    """An op whose reference is its twin on the same inputs in fp32, and whose baseline is the twin
    as it is."""
    args, twin = tuple(args), twin_of(op)

    def check(result: Any) -> float:
        exact = [x.float() if is_half(x) else x for x in args]
        pairs = zip(tensors(result), tensors(twin(*exact, **options)), strict=True)
        return max(difference(found, expected) for found, expected in pairs)

    return Problem(
        run=lambda: op(*args, **options),
        check=check,
        flops=0,
        num_bytes=num_bytes,
        baseline=None if twin is op else lambda: twin(*args, **options),
    )


def is_half(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)


def tensors(result: Any) -> list[Tensor]:
    """One tensor, or a tuple of them."""
    return [result] if isinstance(result, Tensor) else list(result)
