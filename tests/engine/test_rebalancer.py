"""The states of a rebalance: planned beside the steps, in parts, rolled back, refused."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from moe_serve.eplb_config import EplbConfig
from moe_serve.errors import PlacementError
from moe_serve.experts.moving.migration import Copies
from moe_serve.experts.placement import Placement
from moe_serve.rank_messages import Staging
from moe_serve.rebalancer import POLL_SECONDS, Rebalancer, RebalanceResult

NUM_EXPERTS = 8


class FakeMover:
    """Ranks that need `polls` questions for a part; one that is to fail, does."""

    def __init__(self, polls: int = 2, fails_at_part: int | None = None) -> None:
        self.polls, self.fails_at_part = polls, fails_at_part
        self.parts: list[set[int]] = []
        self.switched: list[list[int]] = []
        self.left: int | None = None
        self.num_drops = 0
        self.num_asked = 0
        self.timeouts: list[float] = []

    def stage(self, copies: Copies, timeout: float) -> None:
        assert self.left is None and timeout >= 0
        self.timeouts.append(timeout)
        self.parts.append({copy.layer for own in copies for copy in own})
        self.left = self.polls

    def staging(self) -> Staging:
        self.num_asked += 1
        assert self.left is not None
        if len(self.parts) - 1 == self.fails_at_part:
            return Staging(is_done=False, error="rank 1: a wrong checksum")
        self.left = max(0, self.left - 1)
        return Staging(is_done=self.left == 0, num_bytes=10)

    def switch(self, placement: Placement, layers: list[int]) -> None:
        assert self.left == 0 and set(layers) == self.parts[-1]
        self.left = None
        self.switched.append(layers)

    def drop_staged(self) -> None:
        self.left = None
        self.num_drops += 1

    def checksums(self) -> list[list[list[int]]]:
        return []


def make_rebalancer(mover: FakeMover, **config: Any) -> tuple[Rebalancer, list[float]]:
    """One of 5 layers of 8 experts on 2 ranks with 2 redundant slots, and its clock."""
    now = [0.0]
    placement = Placement.make(5, NUM_EXPERTS, 2, num_redundant=2)
    # An expert takes all that may be staged, so that each layer is a part.
    config = {"staging_mib": 1} | config
    eplb = EplbConfig(**config)
    return Rebalancer(mover, placement, eplb, 2**20, clock=lambda: now[0]), now


def finish(rebalancer: Rebalancer, now: list[float]) -> None:
    for _ in range(1000):
        if not rebalancer.is_busy:
            return
        rebalancer.advance()
        now[0] += 0.1
    raise AssertionError("it never ends")


def skewed_load(seed: int) -> Any:
    return np.random.default_rng(seed).zipf(1.3, (5, NUM_EXPERTS)).astype(np.int64)


def test_a_rebalance_in_parts_switches_layer_after_layer() -> None:
    mover = FakeMover()
    rebalancer, now = make_rebalancer(mover)
    target = Placement.make(5, NUM_EXPERTS, 2, "round_robin", 2)
    results: list[RebalanceResult] = []
    rebalancer.start(target, skewed_load(0), results.append)
    with pytest.raises(PlacementError, match="already"):
        rebalancer.start(target, None)
    finish(rebalancer, now)
    assert rebalancer.placement == target and mover.switched == [[0], [1], [2], [3], [4]]
    # The time is for all parts together, of which each took two looks 0.1 s apart.
    assert mover.timeouts == pytest.approx([60, 59.9, 59.7, 59.5, 59.3])
    (result,) = results
    assert (result.outcome, result.num_bytes, result.num_layers_switched) == ("done", 50, 5)
    old = Placement.make(5, NUM_EXPERTS, 2, num_redundant=2)
    assert result.num_moves == (old.slots_LP != target.slots_LP).sum()


def test_a_placement_in_other_slots_is_refused() -> None:
    rebalancer, _ = make_rebalancer(mover := FakeMover())
    for num_ranks, num_redundant in ((2, 4), (5, 2)):
        target = Placement.make(5, NUM_EXPERTS, num_ranks, num_redundant=num_redundant)
        with pytest.raises(PlacementError, match=r"slots a rank; here are 5 with \[5, 5\]"):
            rebalancer.start(target, None)
    assert not rebalancer.is_busy and not mover.parts


def test_ranks_are_not_asked_before_every_step() -> None:
    mover = FakeMover(polls=3)
    rebalancer, now = make_rebalancer(mover)
    rebalancer.start(Placement.make(5, NUM_EXPERTS, 2, "round_robin", 2), None)
    for _ in range(5):
        rebalancer.advance()
    assert mover.num_asked == 1
    now[0] += POLL_SECONDS
    for _ in range(5):
        rebalancer.advance()
    assert mover.num_asked == 2


@pytest.mark.parametrize("how", ["an error", "time is over"])
def test_a_part_that_fails_leaves_its_layer_and_the_later_ones(how: str) -> None:
    fails_at_part, polls = (2, 2) if how == "an error" else (None, 2)
    mover = FakeMover(polls, fails_at_part)
    rebalancer, now = make_rebalancer(mover, transfer_timeout=0.35 if fails_at_part is None else 9)
    old, target = rebalancer.placement, Placement.make(5, NUM_EXPERTS, 2, "round_robin", 2)
    results: list[RebalanceResult] = []
    rebalancer.start(target, None, results.append)
    finish(rebalancer, now)
    (result,) = results
    assert result.outcome == "failed" and result.error is not None
    switched = result.num_layers_switched
    assert 0 < switched < 5 and mover.num_drops == 1
    assert rebalancer.placement.layers == target.layers[:switched] + old.layers[switched:]
    # Another one can follow.
    mover.fails_at_part, now[0] = None, 0.0
    rebalancer, now = make_rebalancer(mover)
    rebalancer.start(target, None)
    finish(rebalancer, now)
    assert rebalancer.placement == target


def test_what_gains_too_little_does_not_move() -> None:
    mover = FakeMover()
    rebalancer, now = make_rebalancer(mover)
    load = skewed_load(3)
    target = rebalancer.plan(load)
    before, after = rebalancer.gain(load, target)
    assert after > before
    rebalancer.start(target, load, min_gain=after - before)
    assert not rebalancer.is_busy and rebalancer.outcomes == {"unneeded": 1} and not mover.parts
    rebalancer.start(target, load, min_gain=(after - before) / 2)
    finish(rebalancer, now)
    assert rebalancer.placement == target
    rebalancer.start(rebalancer.plan(load), load)
    assert rebalancer.outcomes == {"unneeded": 2, "done": 1}


def test_a_placement_is_looked_for_while_steps_go_on() -> None:
    rebalancer, now = make_rebalancer(FakeMover())
    target, may_end = Placement.make(5, NUM_EXPERTS, 2, "round_robin", 2), threading.Event()

    def slow_plan(*_: object) -> Placement:
        assert may_end.wait(10)
        return target

    rebalancer.plan = slow_plan  # type: ignore[method-assign]
    rebalancer.start_by_load(skewed_load(0))
    for _ in range(3):
        rebalancer.advance()
    assert rebalancer.is_busy and not rebalancer.outcomes
    with pytest.raises(PlacementError, match="already"):
        rebalancer.start(target, None)
    may_end.set()
    while rebalancer.is_busy:
        rebalancer.advance()
        now[0] += 0.001
        time.sleep(0.001)
    assert rebalancer.placement == target and rebalancer.outcomes == {"done": 1}


@pytest.mark.parametrize("error", [PlacementError("no room"), ZeroDivisionError("a fault")])
def test_a_plan_that_fails_is_told_or_raised(error: Exception) -> None:
    rebalancer, _ = make_rebalancer(FakeMover())

    def fail(*_: object) -> Placement:
        raise error

    rebalancer.plan = fail  # type: ignore[method-assign]
    refusals: list[PlacementError] = []
    rebalancer.start_by_load(skewed_load(0), on_refusal=refusals.append)
    if isinstance(error, PlacementError):
        rebalancer.wait()
        assert refusals == [error]
    else:
        with pytest.raises(ZeroDivisionError):
            rebalancer.wait()
    assert not rebalancer.is_busy


@pytest.mark.parametrize("max_moves", [0, 1, 3, 7])
def test_a_budget_limits_the_moves(max_moves: int) -> None:
    mover = FakeMover()
    rebalancer, now = make_rebalancer(mover, max_moves=max_moves)
    results: list[RebalanceResult] = []
    load = skewed_load(4)
    rebalancer.start(rebalancer.plan(load), load, results.append)
    finish(rebalancer, now)
    assert results[0].num_moves <= max_moves
    assert (results[0].outcome == "unneeded") == (max_moves == 0)
    rebalancer.start(rebalancer.plan(load, 0), load, results.append)
    assert results[1].num_moves == 0
