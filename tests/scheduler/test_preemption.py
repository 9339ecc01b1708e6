"""Too few blocks: requests lose them, come back, and nobody can tell."""

from __future__ import annotations

import pytest


def run_three(make_engine, num_blocks, **options):
    engine = make_engine(num_blocks, 4, max_model_len=48, **options)
    for index, request_id in enumerate("abc"):
        engine.add(request_id, range(index * 10, index * 10 + 8), max_tokens=24)
    engine.drain(max_steps=400)
    return engine


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("budget", [3, 7, 256])
def test_a_preempted_request_continues_as_if_nothing_had_been(
    make_engine, enable_prefix_caching, budget
):
    options = {
        "enable_prefix_caching": enable_prefix_caching,
        "max_num_batched_tokens": budget,
    }
    roomy, tight = run_three(make_engine, 1000, **options), run_three(make_engine, 12, **options)
    assert roomy.scheduler.stats().num_preemptions == 0
    assert tight.scheduler.stats().num_preemptions > 0
    assert tight.outputs == roomy.outputs
    assert {len(tokens) for tokens in tight.outputs.values()} == {24}
    assert [tight.endings[i].num_cached_tokens for i in "abc"] == [0, 0, 0]


def test_tokens_computed_again_are_counted(make_engine):
    tight = run_three(make_engine, 12, enable_prefix_caching=False)
    # Without preemption: every token but the last of each request, once.
    num_needed = 3 * (8 + 24 - 1)
    num_again = tight.scheduler.stats().num_recomputed_tokens
    assert num_again > 0
    assert sum(tight.num_computed.values()) == num_needed + num_again


def test_one_that_is_preempted_again_before_it_has_come_as_far(make_engine):
    """What it computes then is computed again, up to where it was the first time."""
    engine = make_engine(16, 4, enable_prefix_caching=False, max_num_batched_tokens=5)
    for index, request_id in enumerate("abcd"):
        engine.add(request_id, range(index * 10, index * 10 + 8), max_tokens=24)
    engine.drain(max_steps=400)
    num_again = engine.scheduler.stats().num_recomputed_tokens
    assert sum(engine.num_computed.values()) == 4 * (8 + 24 - 1) + num_again


def test_the_lowest_priority_and_youngest_is_preempted(make_engine):
    engine = make_engine(12, 4)
    for request_id, priority in (("urgent late", 0), ("old", 1), ("young", 1)):
        engine.add(request_id, [len(request_id)] * 8, priority=priority, max_tokens=24)
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    assert [request.request_id for request in engine.scheduler._waiting] == ["young"]
    engine.drain()
    assert engine.num_preemptions["urgent late"] == 0
    assert engine.num_preemptions["old"] <= engine.num_preemptions["young"]


def test_prompt_logprobs_are_told_once_across_preemptions(make_engine):
    engine = make_engine(12, 4, max_num_batched_tokens=5)
    for index, request_id in enumerate("abc"):
        prompt = range(index * 10, index * 10 + 9)
        engine.add(request_id, prompt, max_tokens=24, prompt_logprobs=0)
    engine.drain()
    assert engine.scheduler.stats().num_preemptions > 0
    for index, request_id in enumerate("abc"):
        entries = engine.prompt_logprobs[request_id]
        wanted = list(range(index * 10 + 1, index * 10 + 9))
        assert [entry.token_id for entry in entries[1:]] == wanted


def test_one_that_outgrows_the_pool_ends_by_length(make_engine):
    engine = make_engine(10, 4)
    engine.add("a", range(30), max_tokens=64)
    engine.drain(max_steps=30)
    assert engine.endings["a"].finish_reason == "length"
    assert len(engine.outputs["a"]) == 10
    assert engine.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_two_that_only_fit_alone_both_end(make_engine, enable_prefix_caching):
    engine = make_engine(10, 4, enable_prefix_caching=enable_prefix_caching)
    engine.add("a", range(16), max_tokens=20)
    engine.add("b", range(40, 56), max_tokens=20)
    engine.drain(max_steps=60)
    assert {len(tokens) for tokens in engine.outputs.values()} == {20}
    assert engine.num_preemptions["a"] == 0
    assert 0 < engine.num_preemptions["b"] < 3


def test_many_in_a_small_pool_are_preempted_a_bounded_number_of_times(make_engine):
    engine = make_engine(24, 2, max_num_batched_tokens=32)
    for index in range(40):
        engine.add(str(index), range(index, index + 3 + index % 7), max_tokens=5 + index % 11)
    engine.drain(max_steps=400)
    assert len(engine.endings) == 40
    assert engine.scheduler.stats().num_preemptions > 0
    assert max(engine.num_preemptions.values()) < 10
