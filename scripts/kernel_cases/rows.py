"""The router, the permutation, the weighted sum, and everything that works on single rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kernel_cases.case import Case
from moe_serve.kernels.combine import weigh_rows_triton, weigh_slots_triton
from moe_serve.kernels.keep_top import keep_top_triton
from moe_serve.kernels.permute import permute_triton
from moe_serve.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from moe_serve.kernels.rotary import rotary_triton
from moe_serve.kernels.sampling import (
    fixed_point_weights_triton,
    log_normalizer_triton,
    pick_triton,
)
from moe_serve.kernels.silu_mul import KINDS, gated_activation_triton
from moe_serve.kernels.topk_router import topk_router_triton

BF16, FP32, FP64, INT64 = torch.bfloat16, torch.float32, torch.float64, torch.int64


def default() -> Iterator[Case]:
    yield from router_cases()
    yield from permute_cases([128])
    yield from combine_cases([7168])
    yield from norm_cases([128, 4096, 7168])
    yield from rotary_cases([(128, 128, False), (64, 64, True)])
    yield from activation_cases(KINDS, [14336])
    yield from sampling_cases([151_936])


def everything() -> Iterator[Case]:
    sizes = [1 << bits for bits in range(15)]
    yield from router_cases()
    yield from plain_router_cases(sizes[:11])
    yield from permute_cases([1, 8, 60, 512])
    yield from combine_cases([33, *sizes])
    yield from norm_cases([33, *sizes])
    yield from rotary_cases(
        (head, turned, pairs) for head in (64, 96, 128, 192, 256) for turned in (head, head // 2)
        for pairs in (False, True)
    )  # fmt: skip
    yield from activation_cases(KINDS, [33, *sizes])
    yield from sampling_cases([33, *sizes, 151_936, 262_144])


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plain_router_cases(sizes: Iterable[int]) -> Iterator[Case]:
    for size in sizes:
        yield Case(
            f"topk_router {size} experts",
            functools.partial(
                topk_router_triton,
                meta(64, size, dtype=FP32),
                min(8, size),
                score="softmax",
                renormalize=True,
            ),
        )


def router_cases() -> Iterator[Case]:
    plain = {"score": "softmax", "renormalize": True}
    v2 = {"score": "softmax", "renormalize": False, "num_groups": 8, "top_groups": 3}
    v3 = {"score": "sigmoid", "renormalize": True, "num_groups": 8, "top_groups": 4, "scale": 2.5}
    for name, num_experts, top_k, options in (
        ("mixtral", 8, 2, plain),
        ("qwen3", 128, 8, plain),
        ("deepseek v3", 256, 8, v3 | {"correction_bias_E": meta(256, dtype=FP32)}),
        ("deepseek v2", 160, 6, v2),
        ("widest", 512, 32, plain),
    ):
        yield Case(
            f"topk_router {name}",
            functools.partial(
                topk_router_triton,
                meta(64, num_experts, dtype=FP32),
                top_k,
                load_CE=meta(3, num_experts, dtype=INT64),
                phases_T=meta(64, dtype=torch.int32),
                num_valid_1=meta(1, dtype=torch.int32),
                **options,
            ),
        )


def permute_cases(experts: Iterable[int]) -> Iterator[Case]:
    for num_experts in experts:
        for num_tokens in (8, 8192):
            ids_TK = meta(num_tokens, 8, dtype=INT64)
            yield Case(
                f"permute E{num_experts} T{num_tokens}",
                functools.partial(permute_triton, ids_TK, num_experts),
            )


def combine_cases(widths: Iterable[int]) -> Iterator[Case]:
    for width in widths:
        weights_TK, inverse_R = meta(64, 8, dtype=FP32), meta(512, dtype=INT64)
        yield Case(
            f"weigh_rows D{width}",
            functools.partial(weigh_rows_triton, meta(512, width), inverse_R, weights_TK),
        )
        yield Case(
            f"weigh_slots D{width}",
            functools.partial(weigh_slots_triton, meta(64, 8, width), weights_TK),
        )


def norm_cases(sizes: Iterable[int]) -> Iterator[Case]:
    for size in sizes:
        # Heads in a matrix of queries, keys and values.
        x_THh = meta(64, 48, size)[:, :32]
        yield Case(f"rms_norm D{size}", functools.partial(rms_norm_triton, x_THh, meta(size), 1e-6))
        x_TD = meta(64, size)
        yield Case(
            f"add_rms_norm D{size}",
            functools.partial(add_rms_norm_triton, x_TD, x_TD, meta(size), 1e-6),
        )


def rotary_cases(layouts: Iterable[tuple[int, int, bool]]) -> Iterator[Case]:
    for head_dim, rotary_dim, interleaved in layouts:
        angles_Tr = meta(64, rotary_dim)
        yield Case(
            f"rotary {rotary_dim} of {head_dim}{' interleaved' * interleaved}",
            functools.partial(
                rotary_triton,
                meta(64, 48, head_dim)[:, :32],
                angles_Tr,
                angles_Tr,
                interleaved=interleaved,
            ),
        )


def activation_cases(kinds: Iterable[str], sizes: Iterable[int]) -> Iterator[Case]:
    for kind in kinds:
        for size in sizes:
            yield Case(
                f"gated_activation {kind} F{size}",
                functools.partial(gated_activation_triton, meta(64, 2 * size), kind),
            )


def sampling_cases(vocab_sizes: Iterable[int]) -> Iterator[Case]:
    for vocab_size in vocab_sizes:
        logits_SV, weights_SV = (meta(8, vocab_size, dtype=dtype) for dtype in (FP32, INT64))
        float_S1, double_S1 = meta(8, 1, dtype=FP32), meta(8, 1, dtype=FP64)
        calls = {
            "fixed_point_weights": functools.partial(
                fixed_point_weights_triton, logits_SV, float_S1, float_S1
            ),
            "keep_top": functools.partial(
                keep_top_triton, weights_SV, logits_SV, meta(8, dtype=INT64), meta(8, dtype=FP64)
            ),
            "pick": functools.partial(pick_triton, weights_SV, double_S1, double_S1),
            "log_normalizer": functools.partial(log_normalizer_triton, logits_SV, float_S1),
        }
        for name, call in calls.items():
            yield Case(f"{name} V{vocab_size}", call)
