"""Paged attention and the store of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernel_cases.case import Case
from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.attention_tiles import HEAD_DIMS
from moe_serve.kernels.kv_store import kv_store_triton
from moe_serve.kernels.paged_attention import paged_attention_triton

_BF16, _FP32, _FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


class _Layer(NamedTuple):
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = _BF16
    pool_dtype: torch.dtype = _BF16
    window: int | None = None
    has_sinks: bool = False
    soft_cap: float | None = None

    def kv(self) -> LayerKV:
        shape = (1000, 16, self.num_kv_heads, self.head_dim)
        keys, values = (torch.empty(shape, dtype=self.pool_dtype, device="meta") for _ in range(2))
        return LayerKV(keys_BsNh=keys, values_BsNh=values)

    def attend(self) -> None:
        """Three decodes and a chunk, so that some blocks are split and all kernels are needed."""
        paged_attention_triton(
            torch.empty(40, self.num_heads, self.head_dim, dtype=self.dtype, device="meta"),
            self.kv(),
            StepContext(
                positions_T=torch.empty(40, dtype=torch.int64, device="meta"),
                slots_T=torch.empty(40, dtype=torch.int64, device="meta"),
                query_starts=[0, 1, 2, 3, 40],
                context_lens=[5000, 8000, 300, 900],
                block_tables_SB=torch.empty(4, 512, dtype=torch.int64, device="meta"),
                num_decodes=3,
                block_size=16,
            ),
            scale=self.head_dim**-0.5,
            window=self.window,
            sinks_H=torch.empty(self.num_heads, device="meta") if self.has_sinks else None,
            soft_cap=self.soft_cap,
        )

    def store(self) -> None:
        shape = (40, self.num_kv_heads, self.head_dim)
        k, v = (torch.empty(shape, dtype=self.dtype, device="meta") for _ in range(2))
        kv_store_triton(k, v, self.kv(), torch.empty(40, dtype=torch.int64, device="meta"))

    def cases(self) -> Iterator[Case]:
        yield Case(f"attention {self.name}", self.attend, has_product=self.dtype != _FP32)
        yield Case(f"kv store {self.name}", self.store)


_LAYERS = [
    _Layer("Qwen3-30B-A3B", 32, 4, 128),
    _Layer("Mixtral-8x7B, fp8 keys", 32, 8, 128, pool_dtype=_FP8),
    _Layer("gpt-oss-120b, window", 64, 8, 64, window=128, has_sinks=True),
    _Layer("gpt-oss-120b, all keys", 64, 8, 64, has_sinks=True),
    _Layer("soft cap, 256 columns", 16, 8, 256, window=4096, soft_cap=50.0),
    _Layer("80 columns", 32, 32, 80),
    _Layer("192 columns", 32, 8, 192),
    _Layer("fp32", 32, 4, 128, dtype=_FP32, pool_dtype=_FP32),
]


def default() -> Iterator[Case]:
    for layer in _LAYERS:
        yield from layer.cases()


def everything() -> Iterator[Case]:
    for head_dim in HEAD_DIMS:
        for dtype in (_BF16, _FP32):
            for pool_dtype in (dtype, _FP8):
                for window, soft_cap in ((None, None), (4096, 50.0), (128, None)):
                    name = f"{head_dim} {dtype} {pool_dtype} window {window}"
                    layer = _Layer(
                        name, 16, 4, head_dim, dtype, pool_dtype, window, window == 128, soft_cap
                    )
                    yield from layer.cases()
