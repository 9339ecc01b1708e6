"""Paged attention against a plain softmax, and its promise that rows do not depend on company.

Of the twin in PyTorch, and of the kernels, with smaller sizes where Triton's interpreter runs them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels import attention_work
from moe_serve.kernels.kv_store import kv_store
from moe_serve.kernels.paged_attention import (
    paged_attention,
    paged_attention_torch,
    paged_attention_triton,
)

CPU = torch.device("cpu")
Span = tuple[int, int, int]


class World:
    """Random keys, values and queries of whole sequences, and a pool that holds them shuffled."""

    def __init__(
        self,
        lens: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        *,
        device: torch.device = CPU,
        block: int = 16,
        pool_dtype: torch.dtype | None = None,
    ):
        rng = torch.Generator().manual_seed(len(lens) * 1000 + heads + dim)

        def randoms(num_heads: int) -> list[Tensor]:
            shapes = [(n, num_heads, dim) for n in lens]
            return [torch.randn(shape, generator=rng).to(dtype).to(device) for shape in shapes]

        self.lens, self.dim, self.block, self.device = lens, dim, block, device
        self.q, self.k, self.v = randoms(heads), randoms(kv_heads), randoms(kv_heads)
        self.sinks = torch.randn(heads, generator=rng).to(device)
        counts = [-(-n // block) for n in lens]
        ids = torch.randperm(sum(counts) + 3, generator=rng)
        self.tables = list(ids[: sum(counts)].split(counts))
        scales = {} if pool_dtype is None else {"key_scale": 0.02, "value_scale": 0.5}
        # Slots that nobody wrote hold NaN: a leak of one shows.
        pool = torch.full((len(ids), block, kv_heads, dim), float("nan"), device=device)
        pool = pool.to(pool_dtype or dtype)
        self.kv = LayerKV(keys_BsNh=pool, values_BsNh=pool.clone(), **scales)
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            positions = torch.arange(len(k))
            slots = table[positions // block] * block + positions % block
            kv_store(k, v, self.kv, slots.to(device))

    def context(self, spans: list[Span]) -> StepContext:
        width = max(len(self.tables[i]) for i, _, _ in spans)
        tables = torch.zeros(len(spans), width, dtype=torch.int64)
        for row, (i, _, _) in enumerate(spans):
            tables[row, : len(self.tables[i])] = self.tables[i]
        starts = [0]
        for _, start, stop in spans:
            starts.append(starts[-1] + stop - start)
        return StepContext(
            positions_T=torch.cat([torch.arange(a, b) for _, a, b in spans]).to(self.device),
            slots_T=torch.empty(0, dtype=torch.int64),
            query_starts=starts,
            context_lens=[stop for _, _, stop in spans],
            block_tables_SB=tables.to(self.device),
            num_decodes=sum(b - a == 1 for _, a, b in spans),
            block_size=self.block,
        )

    def run(self, spans: list[Span], window: int | None = None, **options: Any) -> list[Tensor]:
        """Attend for (sequence, start, stop) spans in one call; single tokens come first."""
        op = options.pop("op", paged_attention)
        if options.pop("has_sinks", False):
            options["sinks_H"] = self.sinks
        q = torch.cat([self.q[i][a:b] for i, a, b in spans])
        out = op(q, self.kv, self.context(spans), scale=self.dim**-0.5, window=window, **options)
        return list(out.split([b - a for _, a, b in spans]))

    def reference(
        self,
        i: int,
        window: int | None = None,
        *,
        has_sinks: bool = False,
        soft_cap: float | None = None,
    ) -> Tensor:
        q, k, v = (x[i].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        ahead = torch.arange(self.lens[i])[:, None] - torch.arange(self.lens[i])
        seen = (ahead >= 0) & (ahead < (window or 10**9))
        scores = q @ k.mT * self.dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        scores = scores.masked_fill(~seen.to(self.device), float("-inf"))
        if has_sinks:
            sinks = self.sinks.double()[:, None, None].expand(-1, self.lens[i], 1)
            return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(0, 1)
        return (scores.softmax(-1) @ v).transpose(0, 1)


SHAPES = [(4, 4, 16), (4, 2, 64), (8, 2, 32), (6, 3, 20), (7, 1, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 8, 200])
def test_prefill_and_decode_match_a_plain_softmax(
    heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    world = World([1, 7, 17, 129, 300], heads, kv_heads, dim, torch.float32)
    spans = [(i, n - 1, n) for i, n in enumerate(world.lens)]
    for (i, _, _), row in zip(spans, world.run(spans, window), strict=True):
        torch.testing.assert_close(
            row[0].double(), world.reference(i, window)[-1], atol=2e-6, rtol=1e-5
        )
    whole = [(i, 0, n) for i, n in enumerate(world.lens)]
    for (i, _, _), rows in zip(whole, world.run(whole, window), strict=True):
        torch.testing.assert_close(rows.double(), world.reference(i, window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_a_row_has_the_same_bits_in_any_chunking_and_company(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None
) -> None:
    world = World([300, 1, 65, 129, 17, 40], heads, kv_heads, dim, dtype)
    whole = world.run([(0, 0, 300)], window)[0]
    for chunk in (7, 64, 129):
        spans = [(0, a, min(a + chunk, 300)) for a in range(0, 300, chunk)]
        pieces = [world.run([span], window)[0] for span in spans]
        assert torch.equal(torch.cat(pieces), whole)
    for position in (0, 1, 15, 16, 127, 128, 255, 299):
        alone = world.run([(0, position, position + 1)], window)[0]
        assert torch.equal(alone[0], whole[position])
        company = [(i, world.lens[i] - 1, world.lens[i]) for i in (1, 2, 3, 4)]
        mixed = world.run([*company, (0, position, position + 1), (5, 0, 40)], window)[4]
        assert torch.equal(mixed[0], whole[position])


RULES = [{}, {"has_sinks": True, "window": 20}, {"soft_cap": 3.0}, {"window": 150}]


@pytest.mark.parametrize("rules", RULES)
def test_sinks_and_soft_cap_match_a_plain_softmax(rules: dict[str, Any]) -> None:
    world = World([1, 17, 129, 300], 6, 3, 20, torch.float32)
    whole = world.run([(i, 0, n) for i, n in enumerate(world.lens)], **rules)
    last = world.run([(i, n - 1, n) for i, n in enumerate(world.lens)], **rules)
    for i, (rows, row) in enumerate(zip(whole, last, strict=True)):
        expected = world.reference(i, **rules)
        torch.testing.assert_close(rows.double(), expected, atol=2e-6, rtol=1e-5)
        assert torch.equal(row[0], rows[-1])


def test_a_pool_of_fp8_holds_numbers_over_a_scale() -> None:
    world = World([1, 17, 129], 4, 2, 64, torch.float32, pool_dtype=torch.float8_e4m3fn)
    for pool, scale, rows in (
        (world.kv.keys_BsNh, 0.02, world.k),
        (world.kv.values_BsNh, 0.5, world.v),
    ):
        for table, row in zip(world.tables, rows, strict=True):
            numbers = pool[table].float().flatten(0, 1)[: len(row)] * scale
            # Four bits of mantissa, one of them unwritten.
            torch.testing.assert_close(numbers, row, rtol=1 / 16, atol=scale * 2**-9)
            row.copy_(numbers)
    for i, rows in enumerate(world.run([(i, 0, n) for i, n in enumerate(world.lens)])):
        torch.testing.assert_close(rows.double(), world.reference(i), atol=2e-5, rtol=1e-4)


# The kernels. In the interpreter a split is 64 keys, a tile 32 keys and 16 rows.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "dtype", "rules"),
    [
        (4, 2, 64, 16, torch.float32, {}),
        (6, 2, 80, 1, torch.float16, {"has_sinks": True}),
        (8, 1, 20, 13, torch.float32, {"window": 9}),
        (2, 2, 96, 32, torch.float16, {"soft_cap": 2.0}),
        (20, 1, 192, 64, torch.float16, {"window": 150, "has_sinks": True}),
        (3, 1, 256, 16, torch.float32, {"window": 70, "soft_cap": 5.0}),
    ],
)
def test_kernels_agree_with_their_twin(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    dtype: torch.dtype,
    rules: dict[str, Any],
) -> None:
    world = World([1, 7, 65, 129, 300], heads, kv_heads, dim, dtype, device=device, block=block)
    spans = [*((i, n - 1, n) for i, n in enumerate(world.lens)), (2, 50, 65), (4, 295, 300)]
    found = world.run(spans, op=paged_attention_triton, **rules)
    expected = world.run(spans, op=paged_attention_torch, **rules)
    atol = TOLERANCES[dtype]
    for rows, expected_rows in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, expected_rows, atol=atol, rtol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_read_a_pool_of_fp8(device: torch.device, dtype: torch.dtype) -> None:
    world = World([7, 150], 4, 2, 64, dtype, device=device, pool_dtype=torch.float8_e4m3fn)
    spans = [(1, 149, 150), (0, 0, 7)]
    found = world.run(spans, op=paged_attention_triton)
    expected = world.run(spans, op=paged_attention_torch)
    for rows, expected_rows in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, expected_rows, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "rules"),
    [
        (2, 1, 64, torch.float16, {}),
        (3, 1, 20, torch.float32, {"has_sinks": True, "window": 9}),
        (2, 1, 32, torch.float32, {"window": 150, "soft_cap": 3.0}),
    ],
)
def test_a_row_of_the_kernels_has_the_same_bits_in_any_chunking_and_company(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    rules: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = {"op": paged_attention_triton, **rules}
    lens = [1, 64, 170] if device.type == "cpu" else [1, 700, 1500]
    world = World(lens, heads, kv_heads, dim, dtype, device=device)
    length = lens[2]
    # One program walks all keys of a row, then one program each split.
    with monkeypatch.context() as patch:
        patch.setattr(attention_work, "_FAIR_SHARE", 0)
        whole = world.run([(2, 0, length)], **rules)[0]
    chunks = [(2, a, min(a + 61, length)) for a in range(0, length, 61)]
    assert torch.equal(torch.cat([world.run([chunk], **rules)[0] for chunk in chunks]), whole)
    company = [(i, lens[i] - 1, lens[i]) for i in range(2)]
    for position in (0, 31, 63, 64, length - 1):
        alone = world.run([(2, position, position + 1)], **rules)[0]
        assert torch.equal(alone[0], whole[position])
        mixed = world.run([*company, (2, position, position + 1), (1, 9, 17)], **rules)[2]
        assert torch.equal(mixed[0], whole[position])


def test_padding_has_no_work_and_does_no_harm(device: torch.device) -> None:
    world = World([70], 4, 2, 16, torch.float32, device=device)
    spans = [(0, 69, 70)]
    expected = world.run(spans, op=paged_attention_triton)[0]
    context = dataclasses.replace(
        world.context(spans * 3),
        context_lens=[70, 0, 0],
        num_valid_1=torch.ones(1, dtype=torch.int32, device=device),
    )
    q = torch.full((3, 4, 16), float("nan"), device=device)
    q[:1] = world.q[0][69:]
    for op in (paged_attention_triton, paged_attention_torch):
        out = op(q, world.kv, context, scale=0.25)
        torch.testing.assert_close(out[:1], expected)
    assert context.work(next(iter(context.works))).counts_4.tolist()[1] == 1


def test_no_tokens_need_no_kernel(device: torch.device) -> None:
    world = World([5], 4, 2, 16, torch.float32, device=device)
    context = StepContext(
        positions_T=torch.empty(0, dtype=torch.int64, device=device),
        slots_T=torch.empty(0, dtype=torch.int64, device=device),
        query_starts=[0],
        context_lens=[],
        block_tables_SB=torch.empty(0, 0, dtype=torch.int64, device=device),
        num_decodes=0,
        block_size=16,
    )
    out = paged_attention_triton(world.q[0][:0], world.kv, context, scale=0.25)
    assert out.shape == (0, 4, 16)
