"""Planned rows and bytes are those of the real dispatchers; times follow from a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from moe_serve.errors import ConfigError, PlacementError
from moe_serve.experts.analysis.expert_shape import ExpertShape
from moe_serve.experts.analysis.hardware import PRESETS, Hardware
from moe_serve.experts.analysis.plan import (
    Layout,
    Plan,
    check_shape,
    make_layouts,
    make_plan,
)
from moe_serve.experts.analysis.replay import SlotTable, cut_steps, replay, sample_steps, step_group
from moe_serve.experts.analysis.step_time import (
    BreakEven,
    ReplicaComparison,
    TimeModel,
    find_break_even,
)
from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.experts.recording import RouteRecording
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.slices import TokenSlices
from moe_serve.routing.backends import make_dispatcher
from moe_serve.routing.expert_map import ExpertMap
from moe_serve.routing.router import Routing
from moe_serve.routing.traffic import BACKENDS
from tests.rank_pool import RankPool

# Shapes: L MoE layers, T tokens, K top-k, E experts, P slots, R ranks, D hidden.


def make_routes(
    num_tokens: int, num_layers: int, num_experts: int, top_k: int, seed: int = 0
) -> RouteRecording:
    """Skewed: low experts are in most choices."""
    rng = np.random.default_rng(seed)
    scores = rng.random((num_tokens, num_layers, num_experts))
    order = np.argsort(-(scores - np.arange(num_experts) * 1.5 / num_experts), axis=-1)
    return RouteRecording(
        model="tiny",
        num_experts=num_experts,
        ids_TLK=order[..., :top_k].astype(np.int16),
        request_lengths=(num_tokens,),
        phases_T=np.zeros(num_tokens, dtype=np.int8),
    )


def shape_for(routes: RouteRecording, hidden: int = 20, dtype: str = "bfloat16") -> ExpertShape:
    return ExpertShape(
        model_type="tiny", num_layers=routes.num_layers, num_experts=routes.num_experts,
        top_k=routes.top_k, hidden=hidden, inner=8, dtype=dtype, weight_dtype=dtype,
    )  # fmt: skip


def priced(
    routes: RouteRecording, hardware: str, hidden: int = 20, dtype: str = "bfloat16"
) -> TimeModel:
    return TimeModel(shape=shape_for(routes, hidden, dtype), hardware=PRESETS[hardware])


def layouts_of(*placements: Placement, num_experts: int) -> list[Layout]:
    return [
        Layout(source="file", num_redundant=placed.num_slots - num_experts, placement=placed)
        for placed in placements
    ]


def shuffled(placement: Placement, seed: int) -> Placement:
    """Each layer's experts under other names: replicas lie elsewhere in each."""
    rng = np.random.default_rng(seed)
    slots_LP = placement.slots_LP
    names = [rng.permutation(placement.num_experts)[row] for row in slots_LP]
    return Placement.of_slots(np.array(names), placement.slots_of_ranks)


# What dispatchers really do


def serve_steps(
    group: RankGroup, backend: Any, placement: Placement, steps: list[Any], hidden: int, dtype: str
) -> tuple[list[int], int]:
    """On each rank: every layer of every step. Rows computed by each slot here, and bytes sent."""
    maps = [ExpertMap.make(layer.experts, group.rank) for layer in placement.layers]
    dispatchers = [make_dispatcher(backend, group, experts) for experts in maps]
    rows = torch.zeros(len(placement.layers[0].experts[group.rank]), dtype=torch.int64)
    group.log.clear()
    for ids_TLK in steps:
        slices = TokenSlices(group, len(ids_TLK))
        own = slice(group.rank * slices.size, group.rank * slices.size + slices.num_valid)
        ids_tLK = torch.from_numpy(ids_TLK[own]).long()
        for layer, dispatcher in enumerate(dispatchers):
            ids_tK = ids_tLK[:, layer]
            x_tD = torch.ones(len(ids_tK), hidden, dtype=getattr(torch, dtype))
            routing = Routing(ids_tK, torch.ones(ids_tK.shape))
            dispatched = dispatcher.dispatch(x_tD, routing, slices.size)
            rows += dispatched.counts_E
            y_tD = dispatcher.combine(dispatched.rows_RD, dispatched)
            assert torch.equal(y_tD, x_tD * ids_tK.shape[1])
    return rows.tolist(), group.bytes_sent


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


UNEVEN = LayerPlacement(((4, 2, 0, 1), (), (3, 0, 5)))
CASES = {
    "two ranks": (Placement.make(2, 7, 2), 20, "bfloat16"),
    "two ranks, replicas": (shuffled(Placement.make(3, 7, 2, num_redundant=4), 1), 33, "bfloat16"),
    "three ranks": (shuffled(Placement.make(2, 8, 3), 2), 33, "float32"),
    "three ranks, replicas": (shuffled(Placement.make(2, 5, 3, num_redundant=10), 3), 1, "float32"),
    "a rank without experts": (Placement((UNEVEN, UNEVEN)), 20, "bfloat16"),
    "four ranks": (Placement.make(2, 9, 4, "round_robin"), 8, "bfloat16"),
    "four ranks, replicas": (shuffled(Placement.make(2, 9, 4, num_redundant=6), 4), 8, "bfloat16"),
    "auto both ways": (shuffled(Placement.make(2, 6, 2, num_redundant=1), 5), 16384, "float32"),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_rows_and_bytes_are_those_of_the_dispatchers(pool: RankPool, case: str) -> None:
    placement, hidden, dtype = CASES[case]
    routes = make_routes(41, placement.num_layers, placement.num_experts, top_k=3)
    plan = make_plan(
        routes,
        layouts_of(placement, num_experts=routes.num_experts),
        batch_tokens=19,
        model=priced(routes, "cpu", hidden, dtype),
    )
    (outcome,) = plan.outcomes
    steps = [routes.ids_TLK[start : start + 19] for start in (0, 19, 38)]
    assert plan.num_steps == len(steps)
    for backend in BACKENDS:
        args = (backend, placement, steps, hidden, dtype)
        served = pool.run(serve_steps, *args, size=placement.num_ranks, deadline=10)
        assert tuple(sum(rows) for rows, _ in served) == outcome.rows_R
        assert tuple(sent for _, sent in served) == outcome.bytes_out[backend]
        by_slot = [count for rows, _ in served for count in rows]
        assert by_slot == replayed_rows(routes, placement, 19)
    if case == "auto both ways":
        sent = [sum(outcome.bytes_out[backend]) for backend in BACKENDS]
        assert len(set(sent)) == 3


def replayed_rows(routes: RouteRecording, placement: Placement, batch_tokens: int) -> list[int]:
    """Of each slot, all layers and steps."""
    table, rows_P = SlotTable.make(placement), np.zeros(placement.num_slots, dtype=np.int64)
    num_layers, num_steps = routes.num_layers, 0
    for ids_NTK in cut_steps(routes.ids_TLK, batch_tokens):
        group = step_group(ids_NTK, num_layers, routes.num_experts, placement.num_ranks, num_steps)
        num_steps += len(ids_NTK) // num_layers
        rows_P += replay(group, table).rows_NP.sum(0)
    total: list[int] = rows_P.tolist()
    return total


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    num_tokens=st.sampled_from([1, 2, 7, 17, 129]),
    batch_tokens=st.sampled_from([1, 2, 7, 17, 300]),
    num_ranks=st.integers(1, 6),
    num_experts=st.integers(1, 9),
    num_redundant=st.integers(0, 12),
    seed=st.integers(0, 999),
)
def test_every_choice_is_computed_once(
    num_tokens: int, batch_tokens: int, num_ranks: int, num_experts: int, num_redundant: int,
    seed: int,
) -> None:  # fmt: skip
    num_redundant = min(num_redundant, num_experts * (num_ranks - 1))
    linear = Placement.make(3, num_experts, num_ranks, num_redundant=num_redundant)
    routes = make_routes(num_tokens, 3, num_experts, min(3, num_experts), seed)
    placement = shuffled(linear, seed)
    layouts = layouts_of(placement, num_experts=num_experts)
    (outcome,) = make_plan(routes, layouts, batch_tokens=batch_tokens).outcomes
    total = num_tokens * routes.top_k * 3
    assert sum(outcome.rows_R) == total
    assert sum(replayed_rows(routes, placement, batch_tokens)) == total
    # A step's busiest ranks are at least as busy as its mean, and at most all of it.
    assert 1 / num_ranks <= outcome.step_balancedness <= 1
    assert sum(outcome.tokens_out_R) <= sum(outcome.results_out_R) <= total


def test_steps_are_cut_in_order_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_serve.experts.analysis.replay._CHUNK", 100)
    ids_TLK = make_routes(41, 2, 6, 3).ids_TLK
    groups = list(cut_steps(ids_TLK, 7))
    assert [len(group) // 2 for group in groups] == [2, 2, 1, 1]
    tokens = [group.reshape(-1, 2, *group.shape[1:]).swapaxes(1, 2) for group in groups]
    flat = np.concatenate([group.reshape(-1, 2, 3) for group in tokens])
    assert (flat == ids_TLK).all()
    whole = list(cut_steps(ids_TLK, 1000))
    assert [group.shape for group in whole] == [(2, 41, 3)]


def test_a_sample_is_of_whole_steps_over_the_whole_recording() -> None:
    ids_TLK = make_routes(41, 2, 6, 3).ids_TLK
    sample = sample_steps(ids_TLK, 4, most_tokens=9)
    expected = [ids_TLK[start : start + 4].swapaxes(0, 1) for start in (0, 20)]
    assert (sample == np.concatenate(expected)).all()
    assert len(sample_steps(ids_TLK, 41, most_tokens=9)) == 2


# Times


def machine(**numbers: float) -> Hardware:
    defaults = {"flops": 1.0, "memory_bandwidth": 1.0, "link_bandwidth": 1.0, "message_seconds": 0}
    return Hardware(name="made up", **(defaults | numbers))


def test_a_step_takes_what_its_slowest_rank_and_the_exchange_take() -> None:
    """Two tokens on two ranks, experts 0 1 | 2: both choose 0 and 1, the second one 2 as well."""
    routes = RouteRecording(
        model="tiny", num_experts=3, ids_TLK=np.array([[[0, 1]], [[0, 2]]], dtype=np.int16),
        request_lengths=(2,), phases_T=np.zeros(2, dtype=np.int8),
    )  # fmt: skip
    shape = shape_for(routes, hidden=4)
    # 3 * 4 * 8 weights: 192 bytes to read; 192 operations a row.
    hardware = machine(memory_bandwidth=192, flops=192 / 10, link_bandwidth=8, message_seconds=100)
    layouts = layouts_of(Placement.make(1, 3, 2), num_experts=3)
    plan = make_plan(
        routes, layouts, batch_tokens=2, model=TimeModel(shape=shape, hardware=hardware)
    )
    (outcome,) = plan.outcomes
    timing = outcome.timing
    assert timing is not None
    # Rank 0 reads two experts and computes three rows.
    assert outcome.rows_R == (3, 1)
    assert timing.expert_seconds == pytest.approx(2 + 3 * 10)
    # Token rows have 4 elements and 2 ids: 16 bytes with padding. Rank 1 sends its token, rank 0
    # one result of 8 bytes. Counts: 1 + 2 of 8 bytes.
    assert outcome.bytes_out["all_to_all"] == (24 + 8, 24 + 16)
    assert timing.exchange_seconds["all_to_all"] == pytest.approx(300 + (24 + 16 + 8) / 8)
    assert outcome.bytes_out["allgather_reducescatter"] == (32, 32)
    assert timing.exchange_seconds["allgather_reducescatter"] == pytest.approx(200 + 32 / 8)
    assert timing.exchange_seconds["auto"] == timing.exchange_seconds["allgather_reducescatter"]
    assert timing.tokens_per_second == pytest.approx(2 / (32 + 204))
    # With a whole copy each rank reads two experts for the two rows of its own token.
    assert timing.replica_tokens_per_second == pytest.approx(2 / (2 + 2 * 10))
    assert outcome.expert_bytes_R == (2 * 192, 192)
    assert plan.replica_bytes == 3 * 192


def one_expert_each(*experts_TL: list[int]) -> RouteRecording:
    """Three experts, top-1: by token, its expert in each layer."""
    return RouteRecording(
        model="tiny", num_experts=3, ids_TLK=np.array(experts_TL, dtype=np.int16)[:, :, None],
        request_lengths=(len(experts_TL),), phases_T=np.zeros(len(experts_TL), dtype=np.int8),
    )  # fmt: skip


def test_an_exchange_takes_what_its_busiest_rank_receives() -> None:
    """A token on each of three ranks, and all go to rank 0: it receives two and sends two back."""
    routes = one_expert_each([0], [0], [0])
    layouts = layouts_of(Placement.make(1, 3, 3), num_experts=3)
    model = TimeModel(shape=shape_for(routes, hidden=4), hardware=machine(link_bandwidth=8))
    (outcome,) = make_plan(routes, layouts, batch_tokens=3, model=model).outcomes
    assert outcome.timing is not None
    # Counts: 2 x 2 of 8 bytes. Tokens: 8 bytes and an id, padded to 16. Results: 8 bytes.
    assert outcome.bytes_out["all_to_all"] == (32 + 2 * 8, 32 + 16, 32 + 16)
    assert outcome.timing.exchange_seconds["all_to_all"] == (32 + 2 * 16 + 2 * 8) / 8


def test_unevenness_of_steps_does_not_cancel_out() -> None:
    """Each rank is the busy one in half of all layers and steps, so that in all they are even."""
    routes = one_expert_each([0, 2], [0, 2], [2, 0], [2, 0])
    layouts = layouts_of(Placement.make(2, 3, 2), num_experts=3)
    model = TimeModel(
        shape=shape_for(routes, hidden=4),
        hardware=machine(memory_bandwidth=192, flops=192 / 10, link_bandwidth=float("inf")),
    )
    (outcome,) = make_plan(routes, layouts, batch_tokens=2, model=model).outcomes
    assert outcome.rows_R == (4, 4) and outcome.balancedness_min == 1
    assert outcome.step_balancedness == 0.5
    assert outcome.timing is not None
    # In each of two layers one expert is read and computes two rows.
    assert outcome.timing.expert_seconds == pytest.approx(2 * (1 + 2 * 10))
    assert outcome.timing.tokens_per_second == pytest.approx(2 / 42)


def all_to_all_experts(num_tokens: int) -> RouteRecording:
    """Each token chooses each of four experts, so that all is known in closed form."""
    ids_TLK = np.tile(np.arange(4, dtype=np.int16), (num_tokens, 1, 1))
    return RouteRecording(
        model="tiny", num_experts=4, ids_TLK=ids_TLK, request_lengths=(num_tokens,),
        phases_T=np.zeros(num_tokens, dtype=np.int8),
    )  # fmt: skip


def break_even_of(hardware: Hardware, num_tokens: int = 200) -> BreakEven:
    routes = all_to_all_experts(num_tokens)
    model = TimeModel(shape=shape_for(routes, hidden=4), hardware=hardware)
    comparison = ReplicaComparison(model, routes.ids_TLK, 4, 2)
    return comparison.break_even(SlotTable.make(Placement.make(1, 4, 2)))


def test_break_even_is_where_saved_reads_pay_for_the_exchange() -> None:
    """b tokens a rank: replicas read 4 experts, two ranks 2 each; both compute 4 b rows a rank.

    Static shapes send 16 + 4 * 8 bytes a token. So 2 reads > 2 messages + 48 b / link.
    """
    reads = machine(memory_bandwidth=192, message_seconds=0.5, link_bandwidth=48 * 5.5)
    # 2 > 1 + b / 5.5
    assert break_even_of(reads) == BreakEven(1, 5, 100)
    assert str(break_even_of(reads)) == "1 to 5"


def test_dearer_exchanges_never_help_expert_parallelism() -> None:
    lasts = []
    for message_seconds in (0.0, 0.3, 0.6, 0.9, 1.1):
        found = break_even_of(
            machine(memory_bandwidth=192, message_seconds=message_seconds, link_bandwidth=48 * 30)
        )
        lasts.append(0 if found.first is None else found.last or found.most)
    assert lasts == sorted(lasts, reverse=True)
    assert lasts[0] > lasts[-1] == 0


def test_break_even_in_words() -> None:
    assert str(break_even_of(machine(memory_bandwidth=1e-9))) == "always"
    assert str(break_even_of(machine(message_seconds=1e9))) == "never"
    assert str(break_even_of(machine(), num_tokens=1)) == "unknown"
    assert str(BreakEven(7, None, 100)) == "from 7"


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 300), (3, 9), (17, 300), (100, 128)])
def test_the_ends_of_a_break_even_are_exact(first: int, last: int) -> None:
    found = find_break_even(lambda size: first <= size <= last, 300)
    assert found == BreakEven(first, last if last < 300 else None, 300)


def test_one_rank_exchanges_nothing() -> None:
    routes = make_routes(17, 2, 5, 2)
    layouts = layouts_of(Placement.make(2, 5, 1), num_experts=5)
    plan = make_plan(
        routes,
        layouts,
        batch_tokens=7,
        model=priced(routes, "h200"),
    )
    (outcome,) = plan.outcomes
    assert outcome.timing is not None and outcome.timing.exchange_seconds["auto"] == 0
    assert outcome.bytes_out == dict.fromkeys(BACKENDS, (0,))
    assert outcome.balancedness_min == 1 and str(outcome.timing.break_even) == "never"


def test_the_best_layout_is_the_fastest_or_else_the_most_even() -> None:
    routes = make_routes(129, 2, 8, 2)
    layouts = make_layouts(routes.counts_LE, [4], [0, 4])
    assert [(one.source, one.num_redundant) for one in layouts] == [
        ("linear", 0), ("balanced", 0), ("linear", 4), ("balanced", 4),
    ]  # fmt: skip
    even = make_plan(routes, layouts, batch_tokens=64)
    most = max(outcome.step_balancedness for outcome in even.outcomes)
    assert even.best.step_balancedness == most
    assert even.best.layout.source == "balanced"
    timed: Plan = make_plan(
        routes,
        layouts,
        batch_tokens=64,
        model=priced(routes, "cpu"),
    )
    speeds = [one.timing.tokens_per_second for one in timed.outcomes if one.timing]
    assert timed.best is timed.outcomes[speeds.index(max(speeds))]


def test_what_does_not_fit_the_trace_is_refused() -> None:
    routes = make_routes(7, 2, 5, 2)
    with pytest.raises(ConfigError, match="model with 6 experts, the trace has 5"):
        check_shape(routes, shape_for(make_routes(7, 2, 6, 2)))
    with pytest.raises(PlacementError, match="room for 5"):
        make_layouts(routes.counts_LE, [2], [6])
