"""Which cases there are, by group."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_bench import attention, exact, gemm, routing, rows, sampling
from kernel_bench.case import Case, ExactCase
from kernel_bench.shapes import (
    MODELS,
    QUICK_TOKENS,
    QWEN3,
    TINY,
    TINY_TOKENS,
    TOKENS,
)

# In this order, so that what matters most comes first.
GROUPS = ("gemm", "attention", "routing", "rows", "sampling")
OTHERS = ("exact", "end_to_end")
# Rows of a batch that sample: the vocabulary makes more than that large.
_MOST_SAMPLING = 64


def list_cases(
    groups: Sequence[str], tokens: Sequence[int] | None, *, is_quick: bool, is_smoke: bool
) -> list[Case]:
    """`tokens` None: those of the suite."""
    models = (TINY,) if is_smoke else MODELS
    counts = tokens or (TINY_TOKENS if is_smoke else QUICK_TOKENS if is_quick else TOKENS)
    vocab_size = TINY.vocab_size if is_smoke else QWEN3.vocab_size
    made = {
        "gemm": lambda: gemm.cases(models, counts),
        "attention": lambda: (
            attention.smoke_cases(TINY) if is_smoke else attention.cases(MODELS, is_quick=is_quick)
        ),
        "routing": lambda: routing.cases(models, counts),
        "rows": lambda: rows.cases(models, counts),
        "sampling": lambda: sampling.cases(
            vocab_size, [count for count in counts if count <= _MOST_SAMPLING]
        ),
    }
    return [case for group in GROUPS if group in groups for case in made[group]()]


def list_exact(*, is_smoke: bool) -> list[ExactCase]:
    if is_smoke:
        return list(exact.cases((TINY,), (7, 33)))
    return list(exact.cases(MODELS, (64, 4096)))
