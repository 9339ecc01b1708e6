"""The routed experts over ranks against the same experts on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.layer import DispatchedExperts, ExpertPath, make_expert_path
from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.kernels.combine import weigh_slots
from moe_serve.models.shard import ModelShard
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.shard import Span, split
from moe_serve.routing.backends import Backend
from moe_serve.routing.local import LocalDispatcher
from moe_serve.routing.router import Routing
from tests.rank_pool import RankPool

pytestmark = pytest.mark.dist

# Shapes: T tokens of a rank, D model, K top-k, E experts, F expert inner, G = 2F.

NUM_EXPERTS, TOP_K, HIDDEN = 7, 3, 40
CPU = torch.device("cpu")
TOKENS = (17, 0, 1, 7)
UNEVEN = ((6, 0), (), (5,), (1, 2, 3, 4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rank r has the tokens of `owners[r]`. A `placement` makes experts whole."""

    num_tokens: tuple[int, ...] = TOKENS
    dtype: str = "float32"
    inner: int = 130
    backend: Backend = "auto"
    placement: tuple[tuple[int, ...], ...] | None = None
    deterministic: bool = False
    owners: tuple[int, ...] = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One rank's results, those of a single rank for the same tokens, and the load it counted.

    `parts_TD`: what parts added in fp32 in order of rank come to. `num_rows` it computed.
    """

    y_TD: Tensor
    expected_TD: Tensor
    parts_TD: Tensor
    num_rows: int


class CountingBank(ExpertBank):
    num_rows = 0

    def activate(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        self.num_rows += int(counts_E.sum())
        return super().activate(rows_RD, counts_E)


def whole_bank(case: Case) -> ExpertBank:
    bank = ExpertBank(NUM_EXPERTS, HIDDEN, case.inner, "silu", getattr(torch, case.dtype), CPU)
    rng = torch.Generator().manual_seed(0)
    for parameter in bank.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=rng) * parameter.shape[2] ** -0.5)
    return bank


def part_of(bank: ExpertBank, experts: tuple[int, ...], rows: Span, columns: Span) -> CountingBank:
    own = CountingBank(
        len(experts), HIDDEN, rows.size, "silu", bank.down_EDF.dtype, CPU, columns.size
    )
    gate, up = bank.gate_up_EGD[list(experts)].chunk(2, dim=1)
    halves = gate[:, rows.start : rows.stop], up[:, rows.start : rows.stop]
    own.gate_up_EGD.copy_(torch.cat(halves, dim=1))
    own.down_EDF.copy_(bank.down_EDF[list(experts), :, columns.start : columns.stop])
    return own


def own_path(group: RankGroup, case: Case, bank: ExpertBank) -> tuple[ExpertPath, CountingBank]:
    layout = RankLayout(
        rank=group.rank,
        tensor_size=group.size,
        expert_parallel=case.placement is not None,
        deterministic=case.deterministic,
    )
    placement = None
    if case.placement is not None:
        placement = Placement((LayerPlacement(case.placement),))
    shard = ModelShard(layout=layout, placement=placement)
    experts = shard.experts(0, NUM_EXPERTS)
    rows, columns = shard.expert_inner(case.inner), shard.expert_down_columns(case.inner)
    path = make_expert_path(layout, group, shard.layer_placement(0, NUM_EXPERTS), case.backend, CPU)
    return path, part_of(bank, experts, rows, columns)


def tokens_of(case: Case, owner: int) -> tuple[Tensor, Routing]:
    """Skewed: half of all tokens want expert 2 first."""
    num_tokens = case.num_tokens[owner]
    rng = torch.Generator().manual_seed(owner)
    x_TD = torch.randn(99, HIDDEN, generator=rng)[:num_tokens].to(getattr(torch, case.dtype))
    scores_TE = torch.rand(99, NUM_EXPERTS, generator=rng)[:num_tokens]
    scores_TE[::2, 2] += 1
    weights_TK = torch.rand(99, TOP_K, generator=rng)[:num_tokens]
    return x_TD, Routing(scores_TE.topk(TOP_K).indices, weights_TK)


def added_parts(x_TD: Tensor, routing: Routing, bank: ExpertBank, inner: int, size: int) -> Tensor:
    """What `size` ranks that split the inner size should give, on one."""
    dispatched = LocalDispatcher(NUM_EXPERTS).dispatch(x_TD, routing, len(x_TD))
    total_TD = torch.zeros(len(x_TD), HIDDEN)
    for rank in range(size):
        span = split(inner, rank, size)
        part = part_of(bank, tuple(range(NUM_EXPERTS)), span, span)
        rows_RD = part(dispatched.rows_RD, dispatched.counts_E)
        slots_TKD = rows_RD[dispatched.inverse_R].view(len(x_TD), TOP_K, HIDDEN)
        total_TD += weigh_slots(slots_TKD, routing.weights_TK)
    return total_TD.to(x_TD.dtype)


def run_case(group: RankGroup, case: Case) -> Outcome:
    """On each rank."""
    bank = whole_bank(case)
    path, own_bank = own_path(group, case, bank)
    x_TD, routing = tokens_of(case, case.owners[group.rank])
    one_rank = DispatchedExperts(LocalDispatcher(NUM_EXPERTS))
    return Outcome(
        y_TD=path.run(x_TD, routing, own_bank, max(case.num_tokens)),
        expected_TD=one_rank.run(x_TD, routing, bank, len(x_TD)),
        parts_TD=added_parts(x_TD, routing, bank, case.inner, group.size),
        num_rows=own_bank.num_rows,
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def run(pool: RankPool, case: Case, size: int = 4) -> list[Outcome]:
    outcomes: list[Outcome] = pool.run(run_case, case, size=size, deadline=10)
    routed = TOP_K * sum(case.num_tokens[owner] for owner in case.owners[:size])
    rows = [outcome.num_rows for outcome in outcomes]
    # Each routed token is computed once, or in part by everyone; padding never.
    assert sum(rows) == routed if case.placement or size == 1 else rows == [routed] * size
    for outcome in outcomes:
        assert outcome.y_TD.dtype == outcome.expected_TD.dtype
    return outcomes


def assert_equal(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert torch.equal(outcome.y_TD, outcome.expected_TD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("placement", ["linear", "round_robin", "uneven"])
def test_whole_experts_on_any_rank_give_the_bits_of_one(
    pool: RankPool, placement: str, backend: Backend, dtype: str
) -> None:
    experts = UNEVEN if placement == "uneven" else None
    experts = experts or Placement.make(1, NUM_EXPERTS, 4, placement).layers[0].experts
    assert_equal(run(pool, Case(placement=experts, backend=backend, dtype=dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_activations_exchanged_give_the_bits_of_one_rank(
    pool: RankPool, size: int, dtype: str
) -> None:
    assert_equal(run(pool, Case(deterministic=True, dtype=dtype), size))


@pytest.mark.parametrize("inner", [130, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_added_in_fp32_in_order_of_rank(
    pool: RankPool, size: int, dtype: str, inner: int
) -> None:
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for outcome in run(pool, Case(inner=inner, dtype=dtype), size):
        y_TD, expected_TD = outcome.y_TD, outcome.expected_TD
        torch.testing.assert_close(y_TD, expected_TD, atol=tolerance, rtol=tolerance)
        assert torch.equal(y_TD, outcome.parts_TD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_tokens_bits_do_not_depend_on_the_others_or_on_its_home(
    pool: RankPool, deterministic: bool, dtype: str
) -> None:
    case = Case(deterministic=deterministic, dtype=dtype)
    usual = [outcome.y_TD for outcome in run(pool, case)]
    moved = dataclasses.replace(case, owners=(3, 2, 1, 0))
    for y_TD, outcome in zip(reversed(usual), run(pool, moved), strict=True):
        assert torch.equal(outcome.y_TD, y_TD)
    fewer = dataclasses.replace(case, num_tokens=(1, 0, 0, 3))
    for y_TD, outcome in zip(usual, run(pool, fewer), strict=True):
        assert torch.equal(outcome.y_TD, y_TD[: len(outcome.y_TD)])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_lane_without_tokens(pool: RankPool, deterministic: bool) -> None:
    assert_equal(run(pool, Case(num_tokens=(0, 0, 0, 0), deterministic=deterministic)))
