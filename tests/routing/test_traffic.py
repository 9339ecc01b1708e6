"""The planner's arithmetic is what the dispatchers' own code does."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from moe_serve.experts.analysis.replay import SlotTable
from moe_serve.experts.placement import Placement
from moe_serve.routing import traffic
from moe_serve.routing.expert_map import ExpertMap
from moe_serve.routing.packing import pack
from moe_serve.routing.traffic import RowFormat

# Shapes: L layers, T tokens of a step, t of a home rank, K top-k, E experts, R ranks.


def skewed_ids(rng: np.random.Generator, num_experts: int, *shape: int) -> np.ndarray:
    """[..., K] distinct choices, of which low experts are in most."""
    scores = rng.random((*shape[:-1], num_experts)) - np.arange(num_experts) * 1.5 / num_experts
    return np.argsort(-scores, axis=-1)[..., : shape[-1]].astype(np.int16)


def shuffled_placement(
    rng: np.random.Generator, num_layers: int, num_experts: int, num_ranks: int, num_redundant: int
) -> Placement:
    """Each layer its own, replicas on any ranks, slots of a rank in any order."""
    linear = Placement.make(1, num_experts, num_ranks, num_redundant=num_redundant)
    counts = linear.slots_of_ranks
    layers = []
    for _ in range(num_layers):
        names = rng.permutation(num_experts)
        own = [rng.permutation(names[list(ranks)]) for ranks in linear.layers[0].experts]
        layers.append(np.concatenate(own))
    return Placement.of_slots(np.array(layers), counts)


def test_turns_count_from_the_home_rank_on() -> None:
    ids_NTK = np.array([[[5], [3], [5], [5], [5], [3]]])
    home_T = traffic.home_ranks(6, 2)
    assert home_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert traffic.turns(ids_NTK, home_T, 6).ravel().tolist() == [0, 0, 1, 1, 2, 1]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 17])
def test_home_ranks_are_equal_runs(num_tokens: int) -> None:
    home_T = traffic.home_ranks(num_tokens, 3)
    size = -(-num_tokens // 3)
    assert home_T.tolist() == [token // size for token in range(num_tokens)]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    num_tokens=st.sampled_from([1, 2, 7, 17, 33]),
    num_ranks=st.integers(1, 5),
    num_experts=st.integers(1, 12),
    num_redundant=st.integers(0, 9),
    seed=st.integers(0, 999),
)
@hypothesis.example(num_tokens=40, num_ranks=4, num_experts=8200, num_redundant=9, seed=0)
def test_the_chosen_slots_are_those_of_the_expert_map(
    num_tokens: int, num_ranks: int, num_experts: int, num_redundant: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_redundant = min(num_redundant, num_experts * (num_ranks - 1))
    placement = shuffled_placement(rng, 2, num_experts, num_ranks, num_redundant)
    ids_LTK = skewed_ids(rng, num_experts, 2, num_tokens, min(4, num_experts))
    home_T = traffic.home_ranks(num_tokens, num_ranks)
    table = SlotTable.make(placement)
    # Two layers of steps that are not the same.
    step_L = np.array([seed, seed // 2])
    slot_LTK = table.choose(ids_LTK, traffic.turns(ids_LTK, home_T, num_experts, step_L))
    starts = np.concatenate(([0], np.cumsum(placement.slots_of_ranks)))
    for layer, rank in np.ndindex(2, num_ranks):
        experts = ExpertMap.make(placement.layers[layer].experts, rank)
        ids_tK = torch.from_numpy(ids_LTK[layer, home_T == rank]).long()
        physical_tK = experts.choose(ids_tK, int(step_L[layer]))
        slots = starts[experts.rank_of(physical_tK)] + experts.index_of(physical_tK).numpy()
        assert slots.tolist() == slot_LTK[layer, home_T == rank].tolist()


@pytest.mark.parametrize("hidden", [1, 3, 8, 33, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 6, 9])
def test_a_packed_row_is_as_long_as_packing_makes_it(
    hidden: int, dtype: torch.dtype, top_k: int
) -> None:
    rows = RowFormat(hidden=hidden, itemsize=dtype.itemsize, top_k=top_k)
    parts = torch.zeros(1, hidden, dtype=dtype), torch.zeros(1, top_k, dtype=torch.int16)
    assert rows.token_bytes == pack(*parts).nbytes
    assert rows.result_bytes == parts[0].nbytes


def test_a_flow_counts_a_token_once_for_each_other_rank_that_needs_it() -> None:
    # Four tokens, two a rank; the ranks of their two experts.
    rank_NTK = np.array([[[1, 1], [0, 1], [0, 0], [1, 1]]])
    flow = traffic.flow(rank_NTK, traffic.home_ranks(4, 2), 2)
    assert flow.tokens_NHR.tolist() == [[[0, 2], [1, 0]]]
    assert flow.rows_NHR.tolist() == [[[1, 3], [2, 2]]]
    assert flow.results_NHR.tolist() == [[[0, 3], [2, 0]]]
