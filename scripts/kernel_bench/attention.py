"""Attention over paged keys and values: decodes, prompts, and prompts behind a prefix."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from kernel_bench.case import BF16, Case, Problem
from kernel_bench.inputs import normal, size_of, spread_evenly
from kernel_bench.shapes import Model
from moe_serve.bench.ruler import difference
from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.paged_attention import paged_attention

# Shapes: T tokens, S sequences, L keys, H heads, N kv heads, G = H / N, h head_dim, B blocks,
# s slots.

BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn
_MOST_CHECKED = 24


class Span(NamedTuple):
    """New tokens of one sequence, at positions `start` .. `stop`."""

    sequence: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What attention needs to know of a model's layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    sinks_H: Tensor | None

    @classmethod
    def of(cls, model: Model, device: torch.device, *, is_windowed: bool) -> Heads:
        sinks_H = normal(model.num_heads, device=device) if model.has_sinks else None
        return cls(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            window=model.window if is_windowed else None,
            sinks_H=sinks_H,
        )

    def first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_seen(self, span: Span) -> int:
        """Keys that each of the span's tokens sees, summed."""
        return sum(p + 1 - self.first_seen(p) for p in range(span.start, span.stop))


class Pool:
    """Keys and values of sequences of these lengths, in blocks that lie in any order."""

    def __init__(
        self, heads: Heads, lens: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.heads, self.device = heads, device
        counts = [-(-length // BLOCK_SIZE) for length in lens]
        tables = torch.randperm(sum(counts)).split(counts)
        self.tables_SB = torch.zeros(len(lens), max(counts), dtype=torch.int64)
        for row, table in enumerate(tables):
            self.tables_SB[row, : len(table)] = table
        shape = (sum(counts), BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        keys, values = (normal(*shape, device=device).to(dtype) for _ in range(2))
        scales = (0.5, 2.0) if dtype == FP8 else (1.0, 1.0)
        self.kv = LayerKV(
            keys_BsNh=keys, values_BsNh=values, key_scale=scales[0], value_scale=scales[1]
        )

    def context(self, spans: Sequence[Span]) -> StepContext:
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + span.stop - span.start)
        positions = [torch.arange(span.start, span.stop) for span in spans]
        tables_SB = self.tables_SB[[span.sequence for span in spans]]
        return StepContext(
            positions_T=torch.cat(positions).to(self.device),
            slots_T=torch.empty(0, dtype=torch.int64, device=self.device),
            query_starts=starts,
            context_lens=[span.stop for span in spans],
            block_tables_SB=tables_SB.to(self.device),
            num_decodes=sum(span.stop - span.start == 1 for span in spans),
            block_size=BLOCK_SIZE,
        )

    def dense(self, sequence: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of these positions, [L, N, h] each."""
        positions_L = torch.arange(start, stop)
        blocks_L = self.tables_SB[sequence][positions_L // BLOCK_SIZE]
        slots_L = (blocks_L * BLOCK_SIZE + positions_L % BLOCK_SIZE).to(self.device)
        kv = self.kv
        keys, values = (x.flatten(0, 1)[slots_L] for x in (kv.keys_BsNh, kv.values_BsNh))
        if keys.dtype == FP8:
            keys, values = keys.float() * kv.key_scale, values.float() * kv.value_scale
        return keys, values

    def attend(self, q_THh: Tensor, context: StepContext) -> Tensor:
        heads = self.heads
        return paged_attention(
            q_THh,
            self.kv,
            context,
            scale=heads.head_dim**-0.5,
            window=heads.window,
            sinks_H=heads.sinks_H,
        )

    def expected(self, q_Hh: Tensor, sequence: int, position: int) -> Tensor:
        """One token's attention in fp32, the plain way."""
        heads = self.heads
        keys, values = self.dense(sequence, heads.first_seen(position), position + 1)
        q_NGh = q_Hh.float().unflatten(0, (heads.num_kv_heads, -1)) * heads.head_dim**-0.5
        scores = torch.einsum("ngh,lnh->ngl", q_NGh, keys.float())
        if heads.sinks_H is not None:
            sinks_NG1 = heads.sinks_H.float().view(*scores.shape[:2], 1)
            scores = torch.cat((scores, sinks_NG1), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("ngl,lnh->ngh", weights, values.float()).flatten(0, 1)


def cases(models: Sequence[Model], *, is_quick: bool) -> Iterator[Case]:
    qwen3, mixtral, gpt_oss = (
        next(model for model in models if model.name.startswith(name))
        for name in ("Qwen3", "Mixtral", "gpt-oss")
    )
    lengths = (1024, 8192) if is_quick else (1024, 8192, 32768)
    batches = (1, 64) if is_quick else (1, 8, 64)
    for length in lengths:
        for batch in batches:
            yield decode_case(qwen3, batch, length)
    yield prefill_case(qwen3, 4096, 0)
    yield prefill_case(qwen3, 4096, 4096)
    for batch in batches:
        yield decode_case(qwen3, batch, 8192, dtype=FP8)
        yield decode_case(gpt_oss, batch, 8192, is_windowed=True)
        yield decode_case(gpt_oss, batch, 8192)
        yield decode_case(mixtral, batch, 8192)
    yield prefill_case(gpt_oss, 4096, 4096, is_windowed=True)
    yield prefill_case(gpt_oss, 4096, 4096)
    yield prefill_case(mixtral, 4096, 0)


def smoke_cases(model: Model) -> Iterator[Case]:
    yield decode_case(model, 3, 70)
    yield decode_case(model, 2, 70, is_windowed=True)
    yield prefill_case(model, 33, 0)
    yield prefill_case(model, 33, 40, is_windowed=True)


def decode_case(
    model: Model,
    batch: int,
    length: int,
    *,
    dtype: torch.dtype = BF16,
    is_windowed: bool = False,
) -> Case:
    return _case(
        "decode",
        model,
        [Span(i, length - 1, length) for i in range(batch)],
        dtype,
        is_windowed,
        "SDPA" + ", no sinks" * model.has_sinks + ", bf16" * (dtype == FP8),
    )


def prefill_case(model: Model, tokens: int, prefix: int, *, is_windowed: bool = False) -> Case:
    baseline = "" if is_windowed else "SDPA" + ", no sinks" * model.has_sinks
    spans = [Span(0, prefix, prefix + tokens)]
    return _case("prefill", model, spans, BF16, is_windowed, baseline)


def _case(
    kind: str,
    model: Model,
    spans: list[Span],
    dtype: torch.dtype,
    is_windowed: bool,
    baseline: str,
) -> Case:
    window = f", window {model.window}" * is_windowed
    length = f"context {spans[0].stop}" + ", fp8 KV" * (dtype == FP8) + window
    return Case(
        op=f"attention: {kind}",
        shape=f"{model.name} {model.num_heads}/{model.num_kv_heads}x{model.head_dim}, {length}",
        tokens=sum(span.stop - span.start for span in spans),
        make=functools.partial(_attend, model, spans, dtype, is_windowed),
        baseline=baseline,
    )


def _attend(
    model: Model,
    spans: list[Span],
    dtype: torch.dtype,
    is_windowed: bool,
    device: torch.device,
    number: int,
) -> Problem:
    heads = Heads.of(model, device, is_windowed=is_windowed)
    pool = Pool(heads, [span.stop for span in spans], dtype, device)
    context = pool.context(spans)
    q_THh = normal(context.num_tokens, heads.num_heads, heads.head_dim, device=device)
    seen = sum(heads.num_seen(span) for span in spans)
    # Each sequence's keys once, from the first that any of its tokens sees.
    read = sum(span.stop - heads.first_seen(span.start) for span in spans)
    bytes_of_key = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    return Problem(
        run=lambda: pool.attend(q_THh, context),
        check=lambda found: _error(found, q_THh, pool, spans),
        flops=4.0 * heads.num_heads * heads.head_dim * seen,
        num_bytes=read * bytes_of_key + 2 * size_of(q_THh),
        baseline=_sdpa(q_THh, pool, spans) if device.type != "meta" else None,
    )


def _error(found_THh: Tensor, q_THh: Tensor, pool: Pool, spans: list[Span]) -> float:
    """Of some rows; all must be finite."""
    if not bool(found_THh.isfinite().all()):
        return float("inf")
    rows = [(span.sequence, position) for span in spans for position in range(*span[1:])]
    checked = spread_evenly(len(rows), _MOST_CHECKED)
    expected = [pool.expected(q_THh[row], *rows[row]) for row in checked]
    return difference(found_THh[checked], torch.stack(expected))


def _sdpa(q_THh: Tensor, pool: Pool, spans: list[Span]) -> Callable[[], Tensor] | None:
    """Torch's attention over keys and values gathered beforehand; it has no sinks, and no window in
    prompts."""
    heads, (start, stop) = pool.heads, spans[0][1:]
    if heads.window is not None and stop - start > 1:
        return None
    first = heads.first_seen(start)
    parts = [pool.dense(span.sequence, first, stop) for span in spans]
    k, v = (
        torch.stack([part[i].to(q_THh.dtype) for part in parts]).transpose(1, 2).contiguous()
        for i in range(2)
    )
    if stop - start == 1:
        # The heads that share keys as rows: each key is read once.
        q_SNGh = q_THh.unflatten(1, (heads.num_kv_heads, -1))
        return lambda: F.scaled_dot_product_attention(q_SNGh, k, v)
    q_1HTh = q_THh.transpose(0, 1)[None].contiguous()
    mask = causal_lower_right(stop - start, stop)
    return lambda: F.scaled_dot_product_attention(q_1HTh, k, v, attn_mask=mask, enable_gqa=True)
