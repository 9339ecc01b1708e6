"""What is refused at the door, and what a request is given when it comes in."""

from __future__ import annotations

import pytest

from moe_serve.errors import ContextLengthError, RequestError


@pytest.mark.parametrize("num_prompt", range(96, 131))
def test_a_prompt_runs_or_is_refused_at_once_and_nobody_behind_it_waits(make_engine, num_prompt):
    engine = make_engine(8, 16)
    if num_prompt < 128:
        engine.add("long", [7] * num_prompt, max_tokens=4)
    else:
        with pytest.raises(ContextLengthError, match=rf"{num_prompt} tokens.* 128") as caught:
            engine.add("long", [7] * num_prompt, max_tokens=4)
        assert caught.value.param == "prompt" and caught.value.status == 400
    engine.add("short", [7] * 10, max_tokens=4)
    engine.drain(max_steps=20)
    assert engine.endings["short"].finish_reason == "length"
    assert len(engine.outputs["short"]) == 4
    if num_prompt < 128:
        assert len(engine.outputs["long"]) == min(4, 128 - num_prompt)
    assert engine.scheduler.stats().num_waiting == 0


def test_an_empty_prompt_and_an_id_in_use_are_refused(make_engine):
    engine = make_engine()
    with pytest.raises(RequestError, match="0 tokens"):
        engine.add("a", [])
    engine.add("a", [1])
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add("a", [1])
    engine.drain()
    engine.endings.clear()
    engine.add("a", [1])
    engine.drain()
    assert engine.endings["a"].finish_reason == "length"


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 13), (50, 13), (13, 13), (5, 5)])
def test_max_tokens_is_clamped_to_the_context(make_engine, max_tokens, expected):
    engine = make_engine(5, 4)
    engine.add("a", range(1, 8), max_tokens=max_tokens)
    engine.drain()
    assert len(engine.outputs["a"]) == expected
    assert engine.endings["a"].finish_reason == "length"


def test_a_seed_is_drawn_only_where_none_was_given(make_engine):
    seeds = iter([11, 12])
    engine = make_engine(seed_source=lambda: next(seeds))
    engine.add("a", [1])
    engine.add("b", [1], seed=5)
    engine.add("c", [1])
    plan = engine.scheduler.schedule()
    assert [chunk.request.seed for chunk in plan.chunks] == [11, 5, 12]
