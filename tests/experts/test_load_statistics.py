from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moe_serve.experts.analysis import load_statistics
from moe_serve.experts.placement import LayerPlacement, Placement

loads = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7, 17])).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.sampled_from([0, 0, 1, 5, 1000]))
)


def test_replicas_share_their_experts_load() -> None:
    placement = Placement((LayerPlacement(((0,), (0, 1), ())),) * 2)
    load_LE = np.array([[6, 2], [0, 0]])
    assert load_statistics.slot_loads(load_LE, placement).tolist() == [[3, 3, 2], [0, 0, 0]]
    load_LR = load_statistics.rank_loads(load_LE, placement)
    assert load_LR.tolist() == [[3, 5, 0], [0, 0, 0]]
    assert load_statistics.balancedness(load_LR).tolist() == pytest.approx([8 / 3 / 5, 1])


@given(loads, st.integers(1, 5), st.integers(0, 3))
@settings(deadline=None)
def test_ranks_together_have_the_load_of_all_experts(
    load_LE: np.ndarray, num_ranks: int, num_redundant: int
) -> None:
    num_layers, num_experts = load_LE.shape
    num_redundant = min(num_redundant, num_experts * (num_ranks - 1))
    placement = Placement.make(num_layers, num_experts, num_ranks, num_redundant=num_redundant)
    load_LR = load_statistics.rank_loads(load_LE, placement)
    assert load_LR.shape == (num_layers, num_ranks)
    np.testing.assert_allclose(load_LR.sum(1), load_LE.sum(1))
    balancedness_L = load_statistics.balancedness(load_LR)
    assert (balancedness_L > 0).all() and (balancedness_L <= 1 + 1e-12).all()


def test_spread_over_experts() -> None:
    load_LE = np.array([[5, 5, 5, 5], [20, 0, 0, 0], [0, 0, 0, 0], [1, 3, 0, 4]])
    bits = -sum(p * np.log2(p) for p in (1 / 8, 3 / 8, 4 / 8)) / 2
    assert load_statistics.entropy(load_LE).tolist() == pytest.approx([1, 0, 1, bits])
    assert load_statistics.gini(load_LE).tolist() == pytest.approx([0, 3 / 4, 0, 7 / 16])
    assert load_statistics.hot_share(load_LE, 2).tolist() == pytest.approx([1 / 2, 1, 0, 7 / 8])
    assert load_statistics.hottest_over_mean(load_LE).tolist() == pytest.approx([1, 4, 1, 2])
    assert load_statistics.dead_experts(load_LE) == [[], [1, 2, 3], [], [2]]


@given(loads)
@settings(deadline=None)
def test_gini_is_the_mean_difference_of_two_experts(load_LE: np.ndarray) -> None:
    for row, value in zip(load_LE, load_statistics.gini(load_LE), strict=True):
        mean = row.mean()
        difference = np.abs(row[:, None] - row[None, :]).mean()
        assert value == pytest.approx(difference / 2 / mean if mean else 0, abs=1e-12)


def test_the_hot_list_is_by_distance_from_the_mean_of_a_layer() -> None:
    load_LE = np.array([[300, 100, 100, 100], [0, 4, 0, 4], [0, 0, 0, 0]])
    assert load_statistics.hot_list(load_LE, 3) == [(0, 0, 300, 2), (1, 1, 4, 2), (1, 3, 4, 2)]
    assert len(load_statistics.hot_list(load_LE, 99)) == 6
    assert load_statistics.hot_list(load_LE, 0) == []


def test_drift_is_the_total_variation_distance() -> None:
    before_LE = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [8, 2, 0, 0], [0, 0, 0, 0]])
    after_LE = np.array([[0, 0, 7, 7], [5, 5, 5, 5], [7, 2, 1, 0], [0, 0, 9, 0]])
    distance_L, moves = load_statistics.drift(before_LE, after_LE, 5)
    assert distance_L.tolist() == pytest.approx([1, 0, 0.1, 0])
    assert [move[:2] for move in moves[:4]] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert {move[:2] for move in moves[4:]} <= {(2, 0), (2, 2)}
    assert moves[2].before == 0 and moves[2].after == 0.5


@given(loads, st.integers(1, 1000))
@settings(deadline=None)
def test_more_of_the_same_is_no_drift(load_LE: np.ndarray, factor: int) -> None:
    distance_L, moves = load_statistics.drift(load_LE, load_LE * factor, 3)
    np.testing.assert_allclose(distance_L, 0, atol=1e-12)
    assert all(abs(move.after - move.before) < 1e-12 for move in moves)
