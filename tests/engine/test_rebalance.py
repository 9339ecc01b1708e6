"""Experts move while requests run, and nobody can tell: B05 of the field's faults.

Ranks are joined anew for each case, as in test_ranks.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from moe_serve.engine import Engine
from moe_serve.eplb_config import EplbConfig
from moe_serve.errors import PlacementError
from moe_serve.experts.moving.expert_server import ExpertServer
from moe_serve.experts.moving.migration import Copies
from moe_serve.experts.moving.pieces import PieceHeader
from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.messages import AddRequest, CallAnswer, PlacementCall, RebalanceCall
from moe_serve.parallel.group import RankGroup
from moe_serve.rank_messages import Staging
from moe_serve.rebalancer import POLL_SECONDS, Rebalancer, RebalanceResult
from moe_serve.sampling_params import SamplingParams
from tests.engine.test_ranks import VOCAB_SIZE, free_port, on_ranks
from tests.rank_pool import RankPool

pytestmark = pytest.mark.dist

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2
NUM_STEPS = 200
# 8 prompts of 5 to 40 tokens.
PROMPTS = [[(5 * i * i + 3 * i + n) % 256 for i in range(5 * n)] for n in range(1, 9)]


@dataclasses.dataclass(frozen=True)
class Told:
    """`bits`: a hash of every token and every logprob of the vocabulary, exact."""

    bits: str
    num_steps: int
    placements: set[Placement]
    outcomes: dict[str, int]


def run_requests(engine: Engine, watch: Callable[[], None], num_steps: int) -> tuple[str, int]:
    """All prompts at once, again and again until so many steps were done."""
    digest, steps = hashlib.sha256(), 0
    while steps < num_steps:
        heard: dict[str, list[bytes]] = {str(n): [] for n in range(len(PROMPTS))}
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(
                temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=VOCAB_SIZE
            )
            engine.add(AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params))
        while engine.has_work:
            for update in engine.step().updates:
                assert update.error is None, update.error
                for entry in update.logprobs or []:
                    numbers = [entry.logprob, *entry.top_logprobs]
                    heard[update.request_id].append(struct.pack(f"{len(numbers)}d", *numbers))
                heard[update.request_id].append(str(update.token_ids).encode())
            steps += 1
            watch()
        digest.update(b"".join(part for name in sorted(heard) for part in heard[name]))
    engine.scheduler.check_integrity()
    return digest.hexdigest(), steps


def random_placement(rng: random.Random, num_slots: tuple[int, ...]) -> Placement:
    return Placement(tuple(_random_layer(rng, num_slots) for _ in range(NUM_LAYERS)))


def _random_layer(rng: random.Random, num_slots: tuple[int, ...]) -> LayerPlacement:
    ranks: list[list[int]] = [[] for _ in num_slots]
    for expert in rng.sample(range(NUM_EXPERTS), NUM_EXPERTS):
        free = [own for own, count in zip(ranks, num_slots, strict=True) if len(own) < count]
        rng.choice(free).append(expert)
    for own, count in zip(ranks, num_slots, strict=True):
        others = [expert for expert in range(NUM_EXPERTS) if expert not in own]
        own += rng.sample(others, count - len(own))
        rng.shuffle(own)
    return LayerPlacement(tuple(map(tuple, ranks)))


def ask(engine: Engine, message: Any) -> CallAnswer:
    engine.experts.call(message)
    end = time.monotonic() + 20
    while not (answers := engine.experts.take_answers()):
        assert time.monotonic() < end
        engine.step()
    (answer,) = answers
    return answer


def check_weights(engine: Engine) -> list[list[int]]:
    """By layer and expert: a checksum, which all replicas of it have."""
    answer = ask(engine, PlacementCall(call_id=0, verify=True))
    assert answer.body is not None, answer.error
    found: list[list[int]] = answer.body["checksums"]
    return found


def check_counts(engine: Engine) -> None:
    """Every token counted once by routers, and computed once by ranks; nothing from padding."""
    engine.experts.monitor.collect()
    recording = engine.experts.monitor.recording(None)
    assert recording.is_conserved
    by_layer = recording.tokens_WC.sum() * TOP_K
    assert recording.counts_LE.sum(1).tolist() == [by_layer] * NUM_LAYERS
    if recording.rows_WLR.shape[2]:
        assert recording.rows_WLR.sum((0, 2)).tolist() == [by_layer] * NUM_LAYERS


def plain(engine: Engine, num_steps: int) -> Told:
    bits, steps = run_requests(engine, lambda: None, num_steps)
    check_counts(engine)
    return Told(bits, steps, set(), {})


def rebalanced(engine: Engine, num_steps: int, seed: int | None) -> Told:
    """`seed` None: to where the load says; else anywhere."""
    rebalancer = engine.experts.rebalancer
    assert rebalancer is not None
    rng = random.Random(seed)
    slots = rebalancer.placement.slots_of_ranks
    if seed is not None:
        rebalancer.plan = lambda *_: random_placement(rng, slots)  # type: ignore[method-assign]
    seen = set()
    before = check_weights(engine)
    bits, steps = run_requests(engine, lambda: seen.add(rebalancer.placement), num_steps)
    check_counts(engine)
    rebalancer.wait()
    assert check_weights(engine) == before
    return Told(bits, steps, seen, dict(rebalancer.outcomes))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


class Runs:
    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self._plain: dict[tuple[int, int], Told] = {}

    def plain(self, tensor: int, data: int) -> Told:
        key = tensor, data
        if key not in self._plain:
            self._plain[key] = self.drive(plain, NUM_STEPS, tensor=tensor, data=data)
        return self._plain[key]

    def drive(
        self,
        function: Callable[..., Any],
        *args: Any,
        tensor: int,
        data: int = 1,
        eplb: dict[str, Any] | None = None,
        start: Callable[..., Any] = on_ranks,
        start_args: tuple[Any, ...] = (),
        **options: Any,
    ) -> Any:
        whole: dict[str, Any] = options | {
            "model": str(self.folder),
            "dtype": "float32",
            "tensor_parallel_size": tensor,
            "data_parallel_size": data,
            "max_logprobs": VOCAB_SIZE,
            "enable_expert_parallel": True,
            "enable_prefix_caching": False,
        }
        if eplb is not None:
            whole |= {"enable_eplb": True, "eplb_config": json.dumps(eplb)}
        size = tensor * data
        results = self.pool.run(
            start, *start_args, size, free_port(), whole, function, *args, size=size, deadline=110
        )
        return results[0]


@pytest.fixture(scope="module")
def runs(pool: RankPool, random_family: Callable[[str], Path]) -> Runs:
    return Runs(pool, random_family("qwen3_moe"))


@pytest.mark.parametrize("num_redundant", [0, 4])
@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (2, 2)])
def test_a_rebalance_before_every_step_changes_no_bit(
    runs: Runs, tensor: int, data: int, num_redundant: int
) -> None:
    eplb = {
        "num_redundant_experts": num_redundant,
        "step_interval": 1,
        "use_async": False,
        "min_gain": -1,
    }
    told = runs.drive(rebalanced, NUM_STEPS, 7, tensor=tensor, data=data, eplb=eplb)
    expected = runs.plain(tensor, data)
    assert told.num_steps == expected.num_steps >= NUM_STEPS
    assert told.bits == expected.bits
    # Before the first step nothing was counted, so it is before every later one.
    assert told.outcomes == {"done": told.num_steps - 1}
    assert len(told.placements) == told.num_steps


def test_rebalancing_by_load_in_the_background_changes_no_bit(runs: Runs) -> None:
    eplb = {"num_redundant_experts": 4, "step_interval": 1, "min_gain": -1, "window_size": 50}
    told = runs.drive(rebalanced, NUM_STEPS, None, tensor=2, eplb=eplb)
    assert told.bits == runs.plain(2, 1).bits
    assert told.outcomes["done"] > 0 and "failed" not in told.outcomes


def by_hand(engine: Engine, num_steps: int) -> str:
    """Through maps that were made by hand, each for a few steps of the running requests."""
    rebalancer = engine.experts.rebalancer
    assert rebalancer is not None
    maps = [
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 4, 5],
        [5, 4, 1, 0, 7, 6, 5, 4, 3, 2, 1, 0],
        # Expert 6 on every rank.
        [6, 0, 1, 2, 3, 4, 6, 5, 7, 0, 1, 2],
    ]
    steps, before = 0, check_weights(engine)

    def next_map() -> None:
        nonlocal steps
        steps += 1
        if steps % 5 == 0:
            slots = maps[steps // 5 % len(maps)]
            call = RebalanceCall(call_id=steps, slots=[slots] * NUM_LAYERS)
            engine.experts.call(call)
            rebalancer.wait()
            (answer,) = engine.experts.take_answers()
            assert answer.body is not None and answer.body["outcome"] in ("done", "unneeded")
            assert rebalancer.placement.slots_LP.tolist() == [slots] * NUM_LAYERS
            assert check_weights(engine) == before

    bits, _ = run_requests(engine, next_map, num_steps)
    check_counts(engine)
    assert rebalancer.outcomes["done"] > 5
    return bits


def test_maps_made_by_hand_change_no_bit(runs: Runs) -> None:
    eplb = {"num_redundant_experts": 4, "step_interval": 0}
    assert runs.drive(by_hand, NUM_STEPS, tensor=2, eplb=eplb) == runs.plain(2, 1).bits


WRONG_PLACEMENTS = {
    "layer 0: expert 7 has no rank": [0, 1, 2, 3, 4, 5, 6, 0],
    "layer 0: expert 3 has no rank": [0, 1, 2, 7, 4, 5, 6, 7],
    "layer 0: rank 0 holds expert 1 twice": [0, 1, 1, 2, 4, 5, 6, 7],
    "layer 0 has 7 slots": [0, 1, 2, 3, 4, 5, 6],
    "layer 0: there is no expert 8": [0, 1, 2, 3, 8, 5, 6, 7],
    "layer 0: there is no expert -1": [-1, 1, 2, 3, 4, 5, 6, 7],
}


def refused(engine: Engine) -> None:
    rebalancer = engine.experts.rebalancer
    assert rebalancer is not None
    placement = rebalancer.placement
    for reason, slots in WRONG_PLACEMENTS.items():
        answer = ask(engine, RebalanceCall(call_id=1, slots=[slots] * NUM_LAYERS))
        assert answer.is_client_fault and answer.error is not None and reason in answer.error
    one_layer = ask(engine, RebalanceCall(call_id=1, slots=[[0, 1, 2, 3, 4, 5, 6, 7]]))
    assert one_layer.error is not None and "2 with" in one_layer.error
    assert rebalancer.placement == placement and not rebalancer.is_busy
    check_weights(engine)


def test_a_placement_that_cannot_be_is_refused_and_nothing_moves(runs: Runs) -> None:
    runs.drive(refused, tensor=2, eplb={"step_interval": 0})


def with_fault(group: RankGroup, fault: str, *args: Any) -> Any:
    """As `on_ranks`, but the first answer of rank 1's experts goes wrong."""
    send, left = ExpertServer._send, [1]

    def go_wrong(self: ExpertServer, peer: bytes, header: PieceHeader, body: zmq.Frame) -> None:
        if not left:
            send(self, peer, header, body)
            return
        left.clear()
        if fault == "corrupted":
            data = bytearray(body.buffer)
            data[len(data) // 2] ^= 1
            send(self, peer, header, zmq.Frame(bytes(data)))

    if group.rank == 1:
        ExpertServer._send = go_wrong  # type: ignore[method-assign]
    try:
        return on_ranks(group, *args)
    finally:
        ExpertServer._send = send  # type: ignore[method-assign]


def rolled_back(engine: Engine, num_steps: int, reason: str) -> str:
    """A rebalance that fails while requests run, then one that does not."""
    rebalancer = engine.experts.rebalancer
    assert rebalancer is not None
    first, before = rebalancer.placement, check_weights(engine)
    other = [4, 5, 6, 7, 0, 1, 2, 3]
    heard: list[CallAnswer] = []

    def move() -> None:
        heard.extend(engine.experts.take_answers())
        if not rebalancer.is_busy and len(heard) < 2:
            call = RebalanceCall(call_id=len(heard), slots=[other] * NUM_LAYERS)
            assert rebalancer.placement == first
            engine.experts.call(call)

    bits, _ = run_requests(engine, move, num_steps)
    failed, done = heard
    assert failed.error is not None and reason in failed.error and not failed.is_client_fault
    assert done.body is not None and done.body["outcome"] == "done"
    # All experts of both layers, each from the other rank.
    expert_bytes = engine.experts.monitor.facts.expert_bytes
    assert done.body["num_bytes"] == NUM_LAYERS * NUM_EXPERTS * expert_bytes > 0
    assert dict(rebalancer.outcomes) == {"failed": 1, "done": 1}
    assert rebalancer.placement.slots_LP.tolist() == [other] * NUM_LAYERS
    assert check_weights(engine) == before
    check_counts(engine)
    return bits


@pytest.mark.parametrize(("fault", "reason"), [("corrupted", "checksum"), ("lost", "within")])
def test_a_transfer_that_fails_is_rolled_back_and_nothing_is_lost(
    runs: Runs, fault: str, reason: str
) -> None:
    eplb = {"step_interval": 0, "transfer_timeout": 1.0}
    bits = runs.drive(
        rolled_back, NUM_STEPS, reason, tensor=2, eplb=eplb, start=with_fault, start_args=(fault,)
    )
    assert bits == runs.plain(2, 1).bits


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
