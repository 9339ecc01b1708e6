"""Paged attention in C++ against its twin, and its promise that a row's bits are its own.

For each instruction set of this machine, and with AMX's tile instructions in plain code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu import library
from moe_serve.kernels.cpu.attention import paged_attention_cpu
from moe_serve.kernels.cpu.build import SETS, BuildError
from moe_serve.kernels.paged_attention import paged_attention, paged_attention_torch
from tests.kernels.test_paged_attention import World

FLOAT, HALF = torch.float32, torch.bfloat16
# Tiles are 64 keys, splits 1024, and 96 query rows are a piece of work.
LENS = [1, 7, 63, 64, 65, 300, 1030, 2100]
EMULATED = "amx, emulated"
Choose = Callable[[str, int], None]


@pytest.fixture
def choose() -> Iterator[Choose]:
    """Use an instruction set, or skip."""

    def choose(name: str, num_threads: int = 1) -> None:
        if name == EMULATED:
            kernels = library.load(emulate_amx=True)
            assert kernels.choose("amx")
            kernels.num_threads = num_threads
            library._active = kernels
        elif not (library.load().choose(name) and library.choose(name, num_threads)):
            pytest.skip(f"no {name} here")

    try:
        library.load()
    except BuildError as error:
        pytest.skip(str(error))
    yield choose
    library.choose(library.NONE, 1)


def shuffled(world: World) -> list[tuple[int, int, int]]:
    """Each sequence's last token, and then chunks of some."""
    last = [(i, n - 1, n) for i, n in enumerate(world.lens)]
    return [*last[::2], *last[1::2], (4, 0, 65), (7, 900, 1300), (5, 290, 300), (6, 1020, 1030)]


def attend(world: World, spans: list[tuple[int, int, int]], window: int | None = None) -> Tensor:
    return torch.cat(world.run(spans, window, op=paged_attention_cpu))


NAMES = [*SETS, EMULATED]
CASES = [
    (4, 4, 32, 16, FLOAT, None),
    (4, 2, 64, 1, FLOAT, 100),
    (8, 2, 96, 24, HALF, 1500),
    (8, 1, 128, 16, HALF, None),
    (2, 2, 64, 24, HALF, 1),
    (16, 2, 32, 16, HALF, 63),
    (3, 1, 256, 16, HALF, 65),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block", "dtype", "window"), CASES)
def test_it_agrees_with_its_twin(
    choose: Choose,
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    choose(name, 2)
    world = World(LENS, heads, kv_heads, dim, dtype, block=block)
    spans = shuffled(world)
    if name == EMULATED:
        spans = [span for span in spans if span[2] <= 300]
    found = attend(world, spans, window)
    expected = torch.cat(world.run(spans, window, op=paged_attention_torch))
    # bf16: weights keep 8 bits, and results are rounded to 8.
    atol, rtol = (2e-6, 1e-5) if dtype == FLOAT else (6e-3, 1e-2)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"), [(4, 1, 32, HALF), (2, 2, 64, HALF), (6, 3, 32, FLOAT)]
)
def test_a_row_has_the_same_bits_in_any_chunking_and_company(
    choose: Choose,
    name: str,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    choose(name)
    # Plain code is slow, and what is merged does not depend on the instruction set.
    length = 150 if name == EMULATED else 1200
    world = World([length, 1, 65, 1030], heads, kv_heads, dim, dtype)
    whole = attend(world, [(0, 0, length)], window)
    for chunk in (20, 64, 333):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            assert torch.equal(attend(world, [(0, start, stop)], window), whole[start:stop])
    company = [(i, world.lens[i] - 1, world.lens[i]) for i in (1, 2, 3)]
    for position in (0, 1, 62, 63, 64, 149, 700, 1023, 1024, 1025, 1199):
        if position >= length:
            break
        spans = [*company, (0, position, position + 1), (2, 0, 64), (3, 1000, 1030)]
        for threads in (1, 2):
            choose(name, threads)
            assert torch.equal(attend(world, spans, window)[3], whole[position])


@pytest.mark.parametrize("name", ["auto", EMULATED])
def test_a_head_has_the_same_bits_on_any_rank(choose: Choose, name: str) -> None:
    choose(name)
    world = World([130, 1100], 8, 4, 64, HALF)
    spans = [(0, 129, 130), (1, 1000, 1100)]
    whole = attend(world, spans)
    for first in range(4):
        own = dataclasses.replace(
            world.kv,
            keys_BsNh=world.kv.keys_BsNh[:, :, first : first + 1].contiguous(),
            values_BsNh=world.kv.values_BsNh[:, :, first : first + 1].contiguous(),
        )
        heads = slice(2 * first, 2 * first + 2)
        q = torch.cat([world.q[i][a:b, heads] for i, a, b in spans]).contiguous()
        out = paged_attention_cpu(q, own, world.context(spans), scale=world.dim**-0.5)
        assert out is not None and torch.equal(out, whole[:, heads])


@pytest.mark.parametrize("scale", [1e-3, 4.0])
def test_scores_may_be_small_or_large(choose: Choose, scale: float) -> None:
    choose("auto")
    world = World([200], 2, 1, 32, FLOAT)
    q, context = world.q[0], world.context([(0, 0, 200)])
    found = paged_attention_cpu(q, world.kv, context, scale=scale)
    expected = paged_attention_torch(q, world.kv, context, scale=scale)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


def test_queries_may_be_columns_of_a_wider_product(choose: Choose) -> None:
    choose("auto")
    world = World([70], 4, 2, 32, FLOAT)
    spans = [(0, 0, 70)]
    wide = torch.cat([world.q[0].flatten(1), torch.ones(70, 40)], 1)
    q = wide[:, :128].unflatten(1, (4, 32))
    assert not q.is_contiguous()
    found = paged_attention_cpu(q, world.kv, world.context(spans), scale=world.dim**-0.5)
    assert found is not None and torch.equal(found, attend(world, spans))


def test_padding_does_no_harm_and_no_tokens_need_no_work(choose: Choose) -> None:
    choose("auto")
    world = World([70], 4, 2, 32, FLOAT)
    context = dataclasses.replace(world.context([(0, 69, 70)] * 3), context_lens=[70, 0, 0])
    q = torch.full((3, 4, 32), float("nan"))
    q[:1] = world.q[0][69:]
    out = paged_attention_cpu(q, world.kv, context, scale=world.dim**-0.5)
    assert out is not None and torch.equal(out[:1], attend(world, [(0, 69, 70)]))
    tables = torch.empty(0, 0, dtype=torch.int64)
    empty = dataclasses.replace(
        context, query_starts=[0], context_lens=[], block_tables_SB=tables, num_decodes=0
    )
    out = paged_attention_cpu(q[:0], world.kv, empty, scale=1.0)
    assert out is not None and out.shape == (0, 4, 32)


DECLINED: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (32, {}, {"soft_cap": 3.0}),
    (32, {}, {"has_sinks": True}),
    (48, {}, {}),
    (32, {"pool_dtype": torch.float8_e4m3fn}, {}),
]


@pytest.mark.parametrize(("dim", "pool", "rules"), DECLINED)
def test_what_it_cannot_do_the_twin_does(
    choose: Choose, dim: int, pool: dict[str, Any], rules: dict[str, Any]
) -> None:
    choose("auto")
    world = World([70], 4, 2, dim, FLOAT, **pool)
    spans = [(0, 60, 70)]
    declined: list[object] = []

    def op(*args: Any, **options: Any) -> Tensor:
        declined.append(paged_attention_cpu(*args, **options))
        return paged_attention(*args, **options)

    found = world.run(spans, op=op, **rules)[0]
    assert declined == [None]
    assert torch.equal(found, world.run(spans, op=paged_attention_torch, **rules)[0])
