"""Dispatch and combine over ranks give the bits of one rank, for any routing and placement."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from moe_serve.parallel.group import RankGroup
from moe_serve.routing.backends import Backend, make_dispatcher
from moe_serve.routing.dispatch import Dispatcher
from moe_serve.routing.expert_map import ExpertMap
from moe_serve.routing.local import LocalDispatcher
from moe_serve.routing.router import Routing
from tests.rank_pool import RankPool

pytestmark = pytest.mark.dist

# Shapes: T tokens of a rank, D model, K top-k, E experts, R rows sorted by local expert.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`placement[rank]`: the experts of that rank's bank, in its order."""

    backend: Backend
    num_tokens: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...]
    top_k: int
    hidden: int
    dtype: str
    kind: str
    spare_capacity: int = 0
    seed: int = 0

    @property
    def num_experts(self) -> int:
        return len({expert for own in self.placement for expert in own})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw."""

    ids: list[list[int]]
    counts: list[int]
    bytes_sent: int
    is_equal: bool


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Routing]:
    rng = torch.Generator().manual_seed(case.seed * 64 + rank)
    num_tokens, num_experts = case.num_tokens[rank], case.num_experts
    scores = torch.rand(num_tokens, num_experts, generator=rng)
    if case.kind == "one expert":
        # Everybody's first choice, then its neighbours: as skewed as top-k can be.
        scores = (torch.arange(num_experts) - case.seed).remainder(num_experts).neg().float()
        scores = scores.repeat(num_tokens, 1)
    elif case.kind == "skewed":
        scores += torch.arange(num_experts) * 4 / num_experts
    x_TD = torch.randn(num_tokens, case.hidden, generator=rng).to(getattr(torch, case.dtype))
    weights_TK = torch.rand(num_tokens, case.top_k, generator=rng)
    return x_TD, Routing(scores.topk(case.top_k).indices, weights_TK)


def compute(rows_RD: Tensor, counts_E: Tensor, experts: list[int], num_experts: int) -> Tensor:
    """Stands for the experts: each has its own factor and shift for each column."""
    assert rows_RD.shape[0] == counts_E.sum() and len(counts_E) == len(experts)
    rng = torch.Generator().manual_seed(7)
    factors, shifts = torch.randn(2, num_experts, rows_RD.shape[1], generator=rng)
    rows_of = torch.tensor(experts, dtype=torch.int64).repeat_interleave(counts_E)
    return (rows_RD.float() * factors[rows_of] + shifts[rows_of]).to(rows_RD.dtype)


def through(
    dispatcher: Dispatcher[Any], case: Case, rank: int, experts: list[int], capacity: int
) -> tuple[Tensor, list[int]]:
    x_TD, routing = tokens_of(case, rank)
    dispatched = dispatcher.dispatch(x_TD, routing, capacity)
    results = compute(dispatched.rows_RD, dispatched.counts_E, experts, case.num_experts)
    return dispatcher.combine(results, dispatched), dispatched.counts_E.tolist()


@functools.lru_cache(maxsize=1)
def oracle(case: Case, rank: int) -> Tensor:
    everything = list(range(case.num_experts))
    return through(LocalDispatcher(case.num_experts), case, rank, everything, 0)[0]


def run_case(group: RankGroup, case: Case) -> Outcome:
    """On each rank. Twice, so that a rank that keeps something from a step is found."""
    dispatcher = make_dispatcher(case.backend, group, ExpertMap.make(case.placement, group.rank))
    capacity = max(case.num_tokens) + case.spare_capacity
    own = list(case.placement[group.rank])
    group.log.clear()
    first, counts = through(dispatcher, case, group.rank, own, capacity)
    bytes_sent = group.bytes_sent
    second, _ = through(dispatcher, case, group.rank, own, capacity)
    expected = oracle(case, group.rank)
    return Outcome(
        ids=tokens_of(case, group.rank)[1].ids_TK.tolist(),
        counts=counts,
        bytes_sent=bytes_sent,
        is_equal=first.dtype == expected.dtype
        and torch.equal(first, expected)
        and torch.equal(second, expected),
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def check(pool: RankPool, case: Case) -> list[Outcome]:
    outcomes = pool.run(run_case, case, size=len(case.placement), deadline=10)
    assert [outcome.is_equal for outcome in outcomes] == [True] * len(outcomes)
    assert [outcome.counts for outcome in outcomes] == turns(case, outcomes)
    assert sum(sum(outcome.counts) for outcome in outcomes) == sum(case.num_tokens) * case.top_k
    return outcomes


def turns(case: Case, outcomes: list[Outcome]) -> list[list[int]]:
    """Rows of each rank's experts in the first step, where the replicas of an expert take turns for
    each home rank, the first turn being that of the rank's own number.
    """
    holders = {
        expert: [rank for rank, own in enumerate(case.placement) if expert in own]
        for expert in range(case.num_experts)
    }
    rows = collections.Counter[tuple[int, int]]()
    for home, outcome in enumerate(outcomes):
        times = collections.Counter[int]()
        for expert in itertools.chain(*outcome.ids):
            ranks = holders[expert]
            rows[ranks[(times[expert] + home) % len(ranks)], expert] += 1
            times[expert] += 1
    return [[rows[rank, expert] for expert in own] for rank, own in enumerate(case.placement)]


@st.composite
def placements(draw: st.DrawFn, num_experts: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Any expert on any rank, or on several, at any place of its bank; ranks may have none."""
    holders = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    if not draw(st.booleans()):
        holders = st.integers(0, num_ranks - 1).map(lambda rank: {rank})
    ranks_of = [draw(holders) for _ in range(num_experts)]
    order = draw(st.permutations(range(num_experts)))
    return tuple(
        tuple(expert for expert in order if rank in ranks_of[expert]) for rank in range(num_ranks)
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 12))
    sizes = st.sampled_from([0, 0, 1, 2, 7, 17, 33])
    return Case(
        backend=draw(st.sampled_from(get_args(Backend))),
        num_tokens=tuple(draw(sizes) for _ in range(num_ranks)),
        placement=draw(placements(num_experts, num_ranks)),
        top_k=draw(st.integers(1, min(num_experts, 5))),
        hidden=draw(st.sampled_from([1, 8, 20, 33])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        kind=draw(st.sampled_from(["even", "skewed", "one expert"])),
        spare_capacity=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 1000)),
    )


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(case=cases())
def test_every_backend_gives_the_bits_of_one_rank(pool: RankPool, case: Case) -> None:
    check(pool, case)


CORNERS = {
    "a rank that gets nothing": Case(
        backend="auto", num_tokens=(5, 0, 3), placement=((0, 1), (2,), ()), top_k=2, hidden=20,
        dtype="float32", kind="even",
    ),
    "one token in the whole world": Case(
        backend="auto", num_tokens=(0, 0, 1, 0), placement=((3,), (2,), (1,), (0,)), top_k=3,
        hidden=33, dtype="bfloat16", kind="even",
    ),
    "all ranks empty": Case(
        backend="auto", num_tokens=(0, 0, 0, 0), placement=((0,), (1,), (2,), (3,)), top_k=2,
        hidden=20, dtype="float32", kind="even",
    ),
    "all tokens to one expert": Case(
        backend="auto", num_tokens=(129, 0, 7, 17), placement=((0, 2), (1, 3), (5, 4), (6, 7)),
        top_k=1, hidden=33, dtype="bfloat16", kind="one expert", seed=4,
    ),
    "one hot expert on all ranks": Case(
        backend="auto", num_tokens=(33, 0, 7, 1), placement=((2, 0), (2, 1), (3, 2), (2,)),
        top_k=1, hidden=33, dtype="float32", kind="one expert", seed=2,
    ),
    "many experts": Case(
        backend="auto", num_tokens=(17, 40), placement=(tuple(range(0, 300, 2)),
        tuple(range(299, 0, -2))), top_k=8, hidden=64, dtype="bfloat16", kind="even",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(pool: RankPool, corner: str, backend: Backend) -> None:
    check(pool, dataclasses.replace(CORNERS[corner], backend=backend))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_to_all_sends_a_token_once_to_each_rank_that_needs_it(
    pool: RankPool, num_ranks: int
) -> None:
    case = Case(
        backend="all_to_all", num_tokens=(17, 33, 0, 7)[:num_ranks],
        placement=tuple(tuple(range(rank, 16, num_ranks)) for rank in range(num_ranks)),
        top_k=6, hidden=32, dtype="bfloat16", kind="skewed",
    )  # fmt: skip
    outcomes = check(pool, case)
    # 32 elements and 6 ids, of 2 bytes each, to a multiple of 8; results have no ids.
    token_bytes, result_bytes, count_bytes = 80, 64, 8 * (1 + 16 // num_ranks)
    for rank, outcome in enumerate(outcomes):
        tokens = sum(len({expert % num_ranks for expert in ids} - {rank}) for ids in outcome.ids)
        others = (o for other, o in enumerate(outcomes) if other != rank)
        results = sum(e % num_ranks == rank for o in others for ids in o.ids for e in ids)
        assert outcome.bytes_sent == (
            tokens * token_bytes + results * result_bytes + (num_ranks - 1) * count_bytes
        )


def test_static_shapes_send_the_same_whatever_the_routing(pool: RankPool) -> None:
    case = Case(
        backend="allgather_reducescatter", num_tokens=(5, 0, 9), placement=((0, 1), (2, 3), (4,)),
        top_k=2, hidden=32, dtype="bfloat16", kind="even",
    )  # fmt: skip
    sent = {
        outcome.bytes_sent
        for kind in ("even", "one expert")
        for num_tokens in ((5, 0, 9), (9, 9, 9))
        for outcome in check(pool, dataclasses.replace(case, kind=kind, num_tokens=num_tokens))
    }
    assert sent == {2 * 9 * (72 + 2 * 64)}


def rows_of_single_tokens(group: RankGroup, backend: Backend, num_steps: int) -> list[int]:
    """Of this rank's experts, where rank 0 alone has a token, the same in each step."""
    dispatcher = make_dispatcher(backend, group, ExpertMap.make(((0, 1), (1, 2)), group.rank))
    counts = torch.zeros(2, dtype=torch.int64)
    num_tokens = int(group.rank == 0)
    routing = Routing(torch.tensor([[1]])[:num_tokens], torch.ones(num_tokens, 1))
    for _ in range(num_steps):
        dispatched = dispatcher.dispatch(torch.ones(num_tokens, 8), routing, 1)
        counts += dispatched.counts_E
        dispatcher.combine(dispatched.rows_RD, dispatched)
    return counts.tolist()


@pytest.mark.parametrize("backend", get_args(Backend))
def test_replicas_take_turns_from_step_to_step(pool: RankPool, backend: Backend) -> None:
    """One request alone must not always go to the first replica."""
    assert pool.run(rows_of_single_tokens, backend, 7, size=2) == [[0, 4], [3, 0]]
