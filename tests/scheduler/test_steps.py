"""Budgets, chunks, and what a step tells."""

from __future__ import annotations

import itertools

import pytest

from moe_serve.errors import LogitsError
from moe_serve.sampling_params import SamplingParams


def shape(plan):
    return [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def test_a_long_prompt_goes_in_chunks_beside_running_decodes(make_engine):
    engine = make_engine(16, 4, max_num_batched_tokens=7)
    engine.add("a", range(1, 6), max_tokens=9)
    engine.add("b", range(20, 37), max_tokens=2)
    assert shape(engine.step()) == [("a", 0, 5), ("b", 0, 2)]
    assert shape(engine.step()) == [("a", 5, 1), ("b", 2, 6)]
    assert shape(engine.step()) == [("a", 6, 1), ("b", 8, 6)]
    engine.add("c", [50, 51, 52], max_tokens=2)
    assert shape(engine.step()) == [("a", 7, 1), ("b", 14, 3), ("c", 0, 3)]
    assert engine.scheduler.stats().num_scheduled_tokens == 7
    assert shape(engine.step()) == [("a", 8, 1), ("b", 17, 1), ("c", 3, 1)]
    engine.drain()
    assert engine.scheduler.stats().num_scheduled_tokens == 0


@pytest.mark.parametrize("budget", [1, 2, 7, 31, 300])
def test_the_chunk_size_does_not_change_the_tokens(make_engine, expected_outputs, budget):
    engine = make_engine(64, 4, max_num_batched_tokens=budget)
    requests = {}
    for index, num_prompt in enumerate([1, 3, 17, 4, 29, 8]):
        prompt = range(index, index + num_prompt)
        engine.add(str(index), prompt, max_tokens=6)
        requests[str(index)] = prompt
    engine.drain()
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    for request_id, prompt in requests.items():
        assert engine.outputs[request_id] == expected_outputs(list(prompt), sampling, 256)


def test_a_budget_below_the_number_of_requests_starves_nobody(make_engine):
    engine = make_engine(32, 4, max_num_batched_tokens=3, max_num_seqs=16)
    for index in range(8):
        engine.add(str(index), [index + 1, 2], max_tokens=5)
    last_progress = {}
    for step in itertools.count():
        plan = engine.step()
        if plan is None:
            break
        for chunk in plan.chunks:
            request_id = chunk.request.request_id
            # Once its prompt is done, a request is in every step.
            if chunk.start > 1:
                assert step - last_progress[request_id] == 1
            last_progress[request_id] = step
    assert sorted(engine.endings) == [str(index) for index in range(8)]


def test_no_more_run_than_max_num_seqs(make_engine):
    engine = make_engine(32, 4, max_num_seqs=3)
    for index in range(7):
        engine.add(str(index), [index], max_tokens=3)
    assert len(engine.step().chunks) == 3
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (3, 4)
    assert stats.kv_cache_usage == 3 / 32
    engine.drain()
    assert len(engine.endings) == 7


def test_priority_goes_before_arrival(make_engine):
    engine = make_engine(32, 4, max_num_seqs=1)
    for request_id, priority in (("a", 1), ("b", 0), ("c", -2), ("d", 0)):
        engine.add(request_id, [1], priority=priority, max_tokens=2)
    engine.drain()
    assert sorted(engine.start_steps, key=engine.start_steps.get) == ["c", "b", "d", "a"]


def test_no_tokens_wanted_ends_with_the_prompt_and_its_logprobs(make_engine):
    engine = make_engine(16, 4, max_num_batched_tokens=5)
    engine.add("a", range(1, 13), max_tokens=0, prompt_logprobs=1)
    engine.drain()
    assert engine.outputs["a"] == [] and engine.endings["a"].finish_reason == "length"
    assert engine.num_steps == 3
    assert engine.endings["a"].prompt_logprobs is not None


@pytest.mark.parametrize("budget", [1, 16, 300])
@pytest.mark.parametrize("num_prompt", [1, 2, 40])
def test_prompt_logprobs_are_complete_cold_warm_and_chunked(make_engine, budget, num_prompt):
    engine = make_engine(32, 8, max_num_batched_tokens=budget)
    for request_id in ("cold", "warm"):
        engine.add(request_id, range(1, num_prompt + 1), max_tokens=1, prompt_logprobs=2)
        engine.drain()
        entries = engine.prompt_logprobs[request_id]
        assert entries[0] is None
        assert [entry.token_id for entry in entries[1:]] == list(range(2, num_prompt + 1))
        assert engine.endings[request_id].num_cached_tokens == 0
    assert engine.scheduler.stats().prefix_cache_queries == 0


def test_stop_tokens_end_a_request_with_their_reason(make_engine):
    engine = make_engine()
    engine.add("free", range(1, 8), max_tokens=12)
    engine.drain()
    third = engine.outputs["free"][2]
    first = engine.outputs["free"].index(third) + 1
    engine.add("stopped", range(1, 8), max_tokens=12, stop_token_ids=(third,))
    engine.drain()
    assert engine.outputs["stopped"] == engine.outputs["free"][:first]
    assert engine.endings["stopped"].finish_reason == "stop"
    assert engine.endings["stopped"].stop_reason == third


def test_times_and_cached_tokens_are_told(make_engine):
    clock = itertools.count(100)
    engine = make_engine(16, 4, clock=lambda: float(next(clock)))
    for request_id in "ab":
        engine.add(request_id, range(1, 10), max_tokens=3)
        engine.drain()
    first, second = engine.endings["a"], engine.endings["b"]
    # The clock is read at the first start and after each of the three steps.
    assert (first.scheduled_time, first.first_token_time) == (100, 101)
    assert (second.scheduled_time, second.first_token_time) == (104, 105)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)


def test_an_abort_between_the_halves_of_a_step_is_safe(make_engine):
    engine = make_engine(16, 4)
    for request_id in "abc":
        engine.add(request_id, range(1, 8), max_tokens=5)
    plan = engine.scheduler.schedule()
    results = engine.run(plan)
    assert engine.scheduler.abort(["b", "nobody", "b"]) == ["b"]
    engine.add("b", [3, 3, 3], max_tokens=2)
    engine.record(engine.scheduler.fail("c", LogitsError("broken")))
    engine.finish_step(plan, results)
    engine.drain()
    assert engine.endings["c"].finish_reason == "error" and engine.endings["c"].error == "broken"
    assert len(engine.outputs["a"]) == 5 and len(engine.outputs["b"]) == 2
    assert engine.scheduler.abort(["a", "b", "c"]) == []


def test_aborting_frees_blocks_at_once(make_engine):
    engine = make_engine(16, 4)
    engine.add("running", range(30), max_tokens=5)
    engine.step()
    engine.add("waiting", range(60), max_tokens=1)
    assert engine.manager.num_free_blocks == 8
    assert engine.scheduler.abort(["running", "waiting"]) == ["running", "waiting"]
    assert engine.manager.num_free_blocks == 16 and not engine.scheduler.has_work
    assert engine.step() is None
