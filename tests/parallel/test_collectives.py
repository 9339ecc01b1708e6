"""Every way to move tensors between ranks gives the bits that torch's process group gives."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_serve.kernels.cpu.build import BuildError
from moe_serve.parallel.collectives import Collectives
from moe_serve.parallel.comm_backend import make_collectives
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.shm.library import load
from tests.rank_pool import RankPool

pytestmark = pytest.mark.dist

ROWS = (0, 1, 7, 17, 129, 300)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.uint8)
OPERATIONS = ("all_gather", "gather", "all_to_all", "reduce_scatter", "all_reduce", "sum_bits")
# Of 80 bytes: just below and above a slot, which is 1 MiB, and three of them and a rest.
LONG_ROWS = (13_107, 13_108, 40_001)
LONG_COLUMNS = 20


class Case(NamedTuple):
    """A call: `num_rows` of each rank, or of each pair of ranks at most."""

    operation: str
    dtype: torch.dtype
    num_rows: int
    num_columns: int = 5
    seed: int = 0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    try:
        load()
    except BuildError as error:
        pytest.skip(str(error))
    with RankPool(4) as pool:
        yield pool


@pytest.mark.parametrize("size", [2, 3, 4])
def test_awkward_sizes_of_every_type(pool: RankPool, size: int) -> None:
    cases = [Case(op, dtype, n) for op in OPERATIONS for dtype in DTYPES for n in ROWS]
    assert sum(pool.run(differing, "shm", known(cases), size=size), []) == []


@pytest.mark.parametrize("size", [2, 3])
def test_messages_that_fill_a_slot_more_than_once(pool: RankPool, size: int) -> None:
    cases = [Case(op, torch.float32, n, LONG_COLUMNS) for op in OPERATIONS for n in LONG_ROWS]
    cases += [Case(op, torch.bfloat16, 60_001, 19) for op in OPERATIONS]
    assert sum(pool.run(differing, "shm", known(cases), size=size), []) == []


calls = st.builds(
    Case,
    st.sampled_from(OPERATIONS),
    st.sampled_from(DTYPES),
    st.integers(0, 40) | st.sampled_from([2000, 30_000]),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 9),
)


@settings(max_examples=12, deadline=None)
@given(st.lists(calls, max_size=12), st.integers(2, 4))
def test_any_sequence_of_calls(pool: RankPool, cases: list[Case], size: int) -> None:
    assert sum(pool.run(differing, "shm", known(cases), size=size), []) == []


def known(cases: list[Case]) -> list[Case]:
    """Those that are defined: bits are summed as int32 or uint8."""
    return [
        case
        for case in cases
        if case.operation != "sum_bits" or case.dtype in (torch.int32, torch.uint8)
    ]


def differing(group: RankGroup, backend: Any, cases: list[Case]) -> list[str]:
    """On a rank: the cases in which the bits are others than those of torch's group."""
    ours, theirs = collectives_of(group, backend)
    try:
        assert (ours.name, ours.rank, ours.size) == (backend, theirs.rank, theirs.size)
        return [
            f"rank {ours.rank}: {case}"
            for case in cases
            if not is_same(perform(ours, case), perform(theirs, case))
        ]
    finally:
        ours.close()


def collectives_of(group: RankGroup, backend: Any) -> tuple[Collectives, Collectives]:
    theirs: Any = group._collectives
    hosts = ["here"] * torch.distributed.get_world_size()
    ours, reason = make_collectives(backend, theirs._group, hosts, 30.0, "cpu")
    assert reason is None
    return ours, theirs


def perform(collectives: Collectives, case: Case) -> list[Tensor]:
    rank, size = collectives.rank, collectives.size
    operation = getattr(collectives, case.operation)
    if case.operation == "all_to_all":
        counts = pair_counts(case, size)
        sent, received = counts[rank], [row[rank] for row in counts]
        out = numbers(case, sum(received), seed=-1)
        operation(out, numbers(case, sum(sent), seed=rank), received, sent)
        return [out]
    if case.operation in ("reduce_scatter", "sum_bits"):
        out = numbers(case, case.num_rows, seed=-1)
        operation(out, numbers(case, case.num_rows * size, seed=rank))
        return [out]
    x = numbers(case, case.num_rows, seed=rank)
    if case.operation == "all_reduce":
        operation(x)
        return [x]
    if case.operation == "all_gather":
        out = numbers(case, case.num_rows * size, seed=-1)
        operation(out, x)
        return [out]
    parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    operation(parts, x)
    return parts or []


def pair_counts(case: Case, size: int) -> list[list[int]]:
    """Rows from each rank to each: uneven, many none, and the last rank gets most."""
    draw = random.Random(case.seed + case.num_rows)
    choices = (0, 1, case.num_rows // 3, case.num_rows)
    return [[*draw.choices(choices, k=size - 1), case.num_rows] for _ in range(size)]


def numbers(case: Case, num_rows: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + seed + 1)
    shape = (num_rows, case.num_columns)
    if not case.dtype.is_floating_point:
        return torch.randint(-9, 99, shape, generator=generator).to(case.dtype)
    # Of many sizes, so that the order of a sum shows; halves overflow, and have tiny ones.
    x = torch.randn(shape, generator=generator) * 10 ** (
        torch.rand(shape, generator=generator) * 13 - 8
    )
    return x.to(case.dtype)


def is_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Bit for bit, but for the payload of a NaN: torch's depends on its place in a vector."""
    pairs = list(zip(ours, theirs, strict=True))
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in pairs)


def bits_of(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.masked_fill(x.isnan(), torch.nan).flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_plain", [False, True])
def test_sums_round_as_torch_does_in_vectors_and_in_plain_code(
    pool: RankPool, dtype: torch.dtype, is_plain: bool
) -> None:
    halves = torch.arange(65536).to(torch.int16)
    first = halves.view(dtype) if dtype != torch.float32 else torch.randn(65536) * 1e38
    generator = torch.Generator().manual_seed(0)
    parts = [first] + [first[torch.randperm(65536, generator=generator)] for _ in range(2)]
    for count in (0, 1, 7, 17, 65536):
        for num_parts in (1, 2, 3):
            out = torch.full((65536,), 3, dtype=dtype)
            pointers = (ctypes.c_void_p * num_parts)(
                *(part.data_ptr() for part in parts[:num_parts])
            )
            number = FLOATS.index(dtype)
            load().moe_serve_shm_add(number, is_plain, out.data_ptr(), pointers, num_parts, count)
            total = parts[0].float()
            for part in parts[1:num_parts]:
                total = total + part.float()
            expected = torch.full((65536,), 3, dtype=dtype)
            expected[:count] = total[:count].to(dtype)
            assert is_same([out], [expected])
