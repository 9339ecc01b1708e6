"""Experts move while requests run, and nobody can tell: B05 of the field's faults.

Ranks are joined anew for each case, as in test_ranks.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from moe_serve.engine import Engine
from moe_serve.experts.moving.expert_server import ExpertServer
from moe_serve.experts.moving.pieces import PieceHeader
from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.messages import AddRequest, CallAnswer, PlacementCall, RebalanceCall
from moe_serve.parallel.group import RankGroup
from moe_serve.sampling_params import SamplingParams
from tests.engine.test_ranks import free_port, on_ranks
from tests.rank_pool import RankPool

pytestmark = pytest.mark.dist

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2
NUM_STEPS = 200
# Alternatives whose logprobs are compared too.
NUM_TOP = 20
# 8 prompts of 5 to 40 tokens.
PROMPTS = [[(5 * i * i + 3 * i + n) % 256 for i in range(5 * n)] for n in range(1, 9)]


@dataclasses.dataclass(frozen=True)
class Told:
    """`bits`: a hash of every token, its logprob and those of the likeliest others, exact."""

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
                temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=NUM_TOP
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
            "max_logprobs": NUM_TOP,
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
    end = time.monotonic() + 60
    while len(heard) < 2 and time.monotonic() < end:
        engine.step()
        move()
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


@pytest.mark.parametrize(
    ("fault", "reason", "timeout"), [("corrupted", "checksum", 30.0), ("lost", "within", 3.0)]
)
def test_a_transfer_that_fails_is_rolled_back_and_nothing_is_lost(
    runs: Runs, fault: str, reason: str, timeout: float
) -> None:
    # Long enough for the second one on a busy machine.
    eplb = {"step_interval": 0, "transfer_timeout": timeout}
    bits = runs.drive(
        rolled_back, NUM_STEPS, reason, tensor=2, eplb=eplb, start=with_fault, start_args=(fault,)
    )
    assert bits == runs.plain(2, 1).bits
