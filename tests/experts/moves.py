"""Placements to move between, and ranks that move experts, as threads of the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.experts.moving.staging import ExpertStaging
from moe_serve.experts.placement import LayerPlacement, Placement

LOOPBACK = "127.0.0.1"
# Nothing here takes that long, unless it hangs.
SOON = 20.0

# By layer and expert: its weights, gate and up rows first.
Weights = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


@st.composite
def moves(draw: st.DrawFn, max_ranks: int = 4) -> tuple[Placement, Placement]:
    """Two placements of as many layers and experts in as many slots, uneven ones, with replicas."""
    num_slots = draw(st.lists(st.integers(0, 4), min_size=1, max_size=max_ranks))
    num_experts = draw(st.integers(max(num_slots), sum(num_slots)))
    num_layers = draw(st.integers(0, 3))
    old, new = (
        Placement(tuple(draw(_layers(num_slots, num_experts)) for _ in range(num_layers)))
        for _ in range(2)
    )
    return old, new


@st.composite
def _layers(draw: st.DrawFn, num_slots: Sequence[int], num_experts: int) -> LayerPlacement:
    """Each expert gets some slot first; the slots that are left get any that the rank lacks."""
    slots = draw(st.permutations([(r, s) for r, size in enumerate(num_slots) for s in range(size)]))
    held: list[dict[int, int]] = [{} for _ in num_slots]
    for index, (rank, slot) in enumerate(slots):
        lacking = sorted(set(range(num_experts)) - set(held[rank].values()))
        held[rank][slot] = index if index < num_experts else draw(st.sampled_from(lacking))
    return LayerPlacement(tuple(tuple(own[slot] for slot in sorted(own)) for own in held))


def random_weights(placement: Placement, dtype: torch.dtype, hidden: int, inner: int) -> Weights:
    """Any bits but those of NaN."""
    return {
        (layer, expert): (
            torch.randn(2 * inner, hidden).to(dtype),
            torch.randn(hidden, inner).to(dtype),
        )
        for layer in range(placement.num_layers)
        for expert in range(placement.num_experts)
    }


def make_banks(
    placement: Placement,
    rank: int,
    weights: Weights,
    dtype: torch.dtype = torch.float32,
    hidden: int = 5,
    inner: int = 3,
) -> list[ExpertBank]:
    banks = []
    for layer, of_ranks in enumerate(placement.layers):
        own = of_ranks.experts[rank]
        bank = ExpertBank(len(own), hidden, inner, "silu", dtype, torch.device("cpu"))
        for slot, expert in enumerate(own):
            for target, source in zip(
                (bank.gate_up_EGD, bank.down_EDF), weights[layer, expert], strict=True
            ):
                target[slot] = source
        banks.append(bank)
    return banks


def check_banks(
    banks: Sequence[ExpertBank], placement: Placement, rank: int, weights: Weights
) -> None:
    """Each slot holds exactly the weights of its expert."""
    for layer, (bank, of_ranks) in enumerate(zip(banks, placement.layers, strict=True)):
        for slot, expert in enumerate(of_ranks.experts[rank]):
            gate_up, down = weights[layer, expert]
            assert torch.equal(bank.gate_up_EGD[slot], gate_up)
            assert torch.equal(bank.down_EDF[slot], down)


def wait_until(holds: Callable[[], bool], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def wait_done(staging: ExpertStaging) -> None:
    def is_done() -> bool:
        state = staging.state()
        assert state.error is None, state.error
        return state.is_done

    wait_until(is_done)


def wait_error(staging: ExpertStaging) -> str:
    wait_until(lambda: staging.state().error is not None)
    state = staging.state()
    assert not state.is_done
    assert state.error is not None
    return state.error


def stage(ranks: Sequence[ExpertStaging], copies: Sequence[Sequence[ExpertCopy]]) -> None:
    for rank, own in zip(ranks, copies, strict=True):
        rank.start(own, SOON)
    for rank in ranks:
        wait_done(rank)
