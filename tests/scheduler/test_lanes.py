"""Several lanes behind one queue: who goes where, and that each lane keeps to itself."""

from __future__ import annotations

import pytest

from moe_serve.lane_choice import MAX_LEAD
from moe_serve.request_queue import MAX_OVERTAKES
from moe_serve.sampling_params import SamplingParams


def running(engine) -> list[list[str]]:
    """Request ids by lane."""
    return [[request.request_id for request in lane.running] for lane in engine.scheduler.lanes]


def counts(engine) -> list[int]:
    return [len(lane.running) for lane in engine.scheduler.lanes]


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_equal_requests_are_spread_evenly(make_engine, enable_prefix_caching):
    engine = make_engine(64, 4, num_lanes=2, enable_prefix_caching=enable_prefix_caching)
    for index in range(8):
        engine.add(str(index), range(9), max_tokens=5)
    plan = engine.step()
    assert running(engine) == [list("0246"), list("1357")]
    assert plan.num_tokens_of_lanes == (36, 36)
    assert [chunk.request.lane for chunk in plan.chunks] == [0] * 4 + [1] * 4
    engine.drain()
    assert len({tuple(tokens) for tokens in engine.outputs.values()}) == 1


def test_a_long_prompt_counts_as_many_short_ones(make_engine):
    engine = make_engine(64, 4, num_lanes=2)
    engine.add("long", range(40), max_tokens=5)
    for index in range(4):
        engine.add(str(index), [index + 1, 2, 3], max_tokens=5)
    engine.step()
    assert running(engine) == [["long"], ["0", "1", "2", "3"]]


def test_lanes_without_requests_have_no_tokens(make_engine):
    engine = make_engine(16, 4, num_lanes=3)
    engine.add("a", range(6), max_tokens=2)
    plan = engine.step()
    assert plan.num_lanes == 3 and plan.num_tokens_of_lanes == (6, 0, 0)
    assert plan.of_lane(0).chunks == plan.chunks
    for lane in (1, 2):
        assert plan.of_lane(lane).chunks == () and plan.of_lane(lane).num_tokens == 0
        assert plan.of_lane(lane).num_tokens_of_lanes == (6, 0, 0)
    engine.drain()
    assert engine.scheduler.schedule() is None


def test_decodes_come_first_within_a_lane(make_engine):
    engine = make_engine(32, 4, num_lanes=2, max_num_batched_tokens=8)
    engine.add("a", range(4), max_tokens=9)
    engine.add("b", range(20, 24), max_tokens=9)
    engine.step()
    engine.add("c", range(40, 60), max_tokens=2, priority=-1)
    engine.add("d", range(60, 80), max_tokens=2, priority=-1)
    shapes = [(chunk.request.request_id, chunk.num_tokens) for chunk in engine.step().chunks]
    assert shapes == [("a", 1), ("c", 7), ("b", 1), ("d", 7)]
    assert engine.scheduler.stats().num_scheduled_tokens == 16


def warm(engine, prompt, lane: int) -> None:
    """Have the prompt computed and cached in this lane."""
    for index in range(lane):
        engine.add(f"filler {index}", [90 + index], max_tokens=1)
    engine.add("warm", prompt, max_tokens=1)
    engine.step()
    engine.drain()
    engine.endings.clear()


def test_a_prefix_hit_wins_over_an_idle_lane(make_engine):
    engine = make_engine(32, 4, num_lanes=3)
    warm(engine, range(16), lane=2)
    for index in range(3):
        engine.add(f"other {index}", [50 + index] * 20, max_tokens=9)
    engine.step()
    assert counts(engine) == [1, 1, 1]
    engine.add("hit", range(16), max_tokens=9)
    engine.add("miss", range(70, 80), max_tokens=9)
    engine.step()
    assert running(engine) == [["other 0", "miss"], ["other 1"], ["other 2", "hit"]]
    engine.drain()
    assert engine.endings["hit"].num_cached_tokens == 12
    assert engine.endings["miss"].num_cached_tokens == 0


@pytest.mark.parametrize("limit", ["blocks", "requests", "tokens"])
def test_a_lane_without_room_spills_to_the_other_in_spite_of_a_hit(make_engine, limit):
    options = {
        "blocks": {"num_blocks": 16},
        "requests": {"max_num_seqs": 1},
        "tokens": {"max_num_batched_tokens": 16},
    }[limit]
    engine = make_engine(**{"num_blocks": 32, "block_size": 4, "num_lanes": 2} | options)
    warm(engine, range(16), lane=1)
    own = 48 if limit == "blocks" else 16
    engine.add("blocker", [*range(12), *range(40, 40 + own)], max_tokens=4)
    engine.add("hit", range(16), max_tokens=4)
    engine.step()
    assert running(engine) == [["hit"], ["blocker"]]
    engine.drain()
    assert engine.endings["hit"].num_cached_tokens == 0
    assert engine.endings["blocker"].num_cached_tokens == 12


def test_a_common_system_prompt_does_not_draw_everything_to_one_lane(make_engine):
    engine = make_engine(128, 4, num_lanes=2, max_num_seqs=32)
    warm(engine, range(16), lane=0)
    for index in range(20):
        engine.add(str(index), [*range(16), 20 + index], max_tokens=6)
    engine.step()
    # Lane 0 alone has the prompt: it gets eight, then they go in turn.
    assert counts(engine) == [14, 6]
    assert max(counts(engine)) - min(counts(engine)) == MAX_LEAD
    engine.drain()


def test_a_lane_far_ahead_takes_what_fits_nowhere_else(make_engine):
    engine = make_engine(64, 4, num_lanes=2, max_num_seqs=32)
    engine.add("large", range(250), max_tokens=6)
    for index in range(12):
        engine.add(str(index), [index, 7, 7], max_tokens=6)
    engine.step()
    assert counts(engine) == [1, 12]
    engine.drain()


def test_limits_hold_for_each_lane(make_engine):
    engine = make_engine(32, 4, num_lanes=2, max_num_seqs=3)
    for index in range(10):
        engine.add(str(index), [index + 1], max_tokens=3)
    assert len(engine.step().chunks) == 6
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (6, 4)
    assert stats.kv_cache_usage == 6 / 64
    engine.drain()
    assert len(engine.endings) == 10


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_preempted_request_may_come_back_in_another_lane(
    make_engine, expected_outputs, enable_prefix_caching
):
    engine = make_engine(
        10, 4, num_lanes=2, max_num_seqs=2, enable_prefix_caching=enable_prefix_caching
    )
    prompts = {name: list(range(20 * row, 20 * row + 14)) for row, name in enumerate("abcd")}
    for name in "abcd":
        engine.add(name, prompts[name], max_tokens=4 if name in "bd" else 20)
    lanes: dict[str, list[int]] = {}
    while (plan := engine.step()) is not None:
        for chunk in plan.chunks:
            lanes.setdefault(chunk.request.request_id, []).append(chunk.request.lane)
        if engine.num_steps == 2:
            assert running(engine) == [["a", "c"], ["b", "d"]]
    assert engine.scheduler.stats().num_preemptions == 1
    assert sorted(set(lanes["c"])) == [0, 1] and set(lanes["a"]) == {0}
    for name, prompt in prompts.items():
        sampling = SamplingParams(max_tokens=4 if name in "bd" else 20, ignore_eos=True)
        assert engine.outputs[name] == expected_outputs(prompt, sampling, 40)


def test_a_large_request_is_not_starved_by_small_ones_in_any_lane(make_engine):
    engine = make_engine(32, 4, num_lanes=2, max_num_seqs=32)
    for index in range(2):
        engine.add(f"runner {index}", range(60 + index), max_tokens=40)
    engine.step()
    assert counts(engine) == [1, 1]
    engine.add("large", range(100, 220), max_tokens=2)
    for index in range(80):
        engine.add(f"small {index}", [index], max_tokens=3 + index % 5)
        engine.step()
    engine.drain()
    large = engine.start_steps["large"]
    assert sum(step < large for step in engine.start_steps.values()) == 2 + MAX_OVERTAKES


@pytest.mark.parametrize("ending", ["aborted while it waits", "aborted", "finished"])
def test_an_id_used_again_inherits_nothing_from_any_lane(make_engine, ending):
    """Prefixes are looked for in lanes that the request never ran in."""
    engine = make_engine(32, 4, num_lanes=2, max_num_seqs=1)
    for index in range(2):
        engine.add(f"cached {index}", range(12), max_tokens=1)
    engine.drain()
    if ending == "aborted while it waits":
        for index in range(2):
            engine.add(f"runner {index}", [index + 1], max_tokens=2, priority=-1)
    engine.add("same", range(12), max_tokens=4)
    engine.step()
    if ending != "finished":
        assert engine.scheduler.abort(["same"]) == ["same"]
    engine.drain()
    engine.endings.clear()
    engine.outputs.clear()
    for index in range(2):
        engine.add("same", range(40, 52), max_tokens=4, priority=index)
        if index == 0:
            engine.add("beside", [5], max_tokens=4, priority=-1)
        engine.drain()
        assert engine.endings.pop("same").num_cached_tokens == (8 if index else 0)
        engine.endings.clear()


def test_one_lane_plans_as_it_always_did(make_engine):
    """Recorded before there were lanes: a full pool, preemptions, recomputing, chunks."""
    engine = make_engine(9, 4, max_num_seqs=4, max_num_batched_tokens=12)
    for name, num_prompt, first in zip(
        "abcdef", (9, 3, 14, 6, 1, 9), (0, 10, 20, 30, 40, 0), strict=True
    ):
        prompt = range(first, first + num_prompt)
        engine.add(name, prompt, max_tokens=10, priority=-1 if name == "e" else 0)
    rows = []
    while (plan := engine.step()) is not None:
        rows.append(
            " ".join(
                f"{chunk.request.request_id}{chunk.start}+{chunk.num_tokens}"
                for chunk in plan.chunks
            )
        )
    assert rows == RECORDED.strip().splitlines()
    stats = engine.scheduler.stats()
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (3, 14)


RECORDED = """
e0+1 a0+9 b0+2
e1+1 a9+1 b2+1 d0+6
e2+1 a10+1 b3+1 d6+1
e3+1 a11+1 b4+1 d7+1
e4+1 a12+1 b5+1
e5+1 a13+1 b6+1
e6+1 a14+1 b7+1
e7+1 a15+1 b8+1
e8+1 a16+1
e9+1 a17+1
b4+6 c0+6
b10+1 c6+8
b11+1 c14+1
c15+1 d0+9
c16+1 d9+1
c17+1 d10+1
c18+1 d11+1
c19+1 d12+1
c20+1
c21+1
c22+1
d12+2 f0+9
d14+1 f9+1
f10+1
f11+1
f12+1
f13+1
f14+1
f15+1
f16+1
f17+1
"""
