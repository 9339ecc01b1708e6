"""Paged attention against a plain softmax, and its promise that rows do not depend on company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.kv_store import kv_store
from moe_serve.kernels.paged_attention import paged_attention

BLOCK = 16


class World:
    """Random keys, values and queries of whole sequences, and a pool that holds them shuffled."""

    def __init__(self, lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
        rng = torch.Generator().manual_seed(len(lens) * 1000 + heads + dim)
        self.lens, self.dim = lens, dim
        self.q = [torch.randn(n, heads, dim, generator=rng).to(dtype) for n in lens]
        self.k = [torch.randn(n, kv_heads, dim, generator=rng).to(dtype) for n in lens]
        self.v = [torch.randn(n, kv_heads, dim, generator=rng).to(dtype) for n in lens]
        counts = [-(-n // BLOCK) for n in lens]
        ids = torch.randperm(sum(counts) + 3, generator=rng)
        self.tables = list(ids[: sum(counts)].split(counts))
        # Slots that nobody wrote hold NaN: a leak of one shows.
        shape = (len(ids), BLOCK, kv_heads, dim)
        self.kv = LayerKV(
            keys_BsNh=torch.full(shape, float("nan"), dtype=dtype),
            values_BsNh=torch.full(shape, float("nan"), dtype=dtype),
        )
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            positions = torch.arange(len(k))
            kv_store(k, v, self.kv, table[positions // BLOCK] * BLOCK + positions % BLOCK)

    def run(self, spans: list[tuple[int, int, int]], window: int | None = None) -> list[Tensor]:
        """Attend for (sequence, start, stop) spans in one call; single tokens come first."""
        width = max(len(self.tables[i]) for i, _, _ in spans)
        tables = torch.zeros(len(spans), width, dtype=torch.int64)
        for row, (i, _, _) in enumerate(spans):
            tables[row, : len(self.tables[i])] = self.tables[i]
        starts = [0]
        for _, start, stop in spans:
            starts.append(starts[-1] + stop - start)
        context = StepContext(
            positions_T=torch.cat([torch.arange(a, b) for _, a, b in spans]),
            slots_T=torch.empty(0, dtype=torch.int64),
            query_starts=starts,
            context_lens=[stop for _, _, stop in spans],
            block_tables_SB=tables,
            num_decodes=sum(b - a == 1 for _, a, b in spans),
            block_size=BLOCK,
        )
        q = torch.cat([self.q[i][a:b] for i, a, b in spans])
        out = paged_attention(q, self.kv, context, scale=self.dim**-0.5, window=window)
        return list(out.split([b - a for _, a, b in spans]))

    def reference(self, i: int, window: int | None = None) -> Tensor:
        q, k, v = (x[i].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        ahead = torch.arange(self.lens[i])[:, None] - torch.arange(self.lens[i])
        seen = (ahead >= 0) & (ahead < (window or 10**9))
        scores = (q @ k.mT * self.dim**-0.5).masked_fill(~seen, float("-inf"))
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
