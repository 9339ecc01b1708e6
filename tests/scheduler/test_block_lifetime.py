"""Blocks come back, and come back without their old identity."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_no_block_is_lost_over_many_requests(make_engine, enable_prefix_caching):
    engine = make_engine(16, 4, enable_prefix_caching=enable_prefix_caching)
    for index in range(200):
        request_id = str(index)
        engine.add(request_id, [index % 97, *range(index, index + 19)], max_tokens=8)
        if index % 3 == 2:
            for _ in range(3):
                engine.step()
            assert engine.scheduler.abort([request_id]) == [request_id]
        engine.drain()
        assert engine.manager.num_free_blocks == 16
        engine.scheduler.check_integrity()
    for index in range(20):
        request_id = f"again {index}"
        engine.add(request_id, [index % 97, *range(index, index + 19)], max_tokens=8)
        engine.drain()
        if index % 3 != 2:
            assert engine.outputs[request_id] == engine.outputs[str(index)]


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 31, 32, 33, 48])
def test_the_same_prompt_again_and_twice_at_once(make_engine, num_prompt):
    engine = make_engine(32, 16)
    for request_id in ("first", "second", "third"):
        engine.add(request_id, range(num_prompt), max_tokens=8)
        engine.drain()
    cached = (num_prompt - 1) // 16 * 16
    assert engine.endings["second"].num_cached_tokens == cached <= num_prompt - 1
    engine.add("left", range(num_prompt), max_tokens=8)
    engine.add("right", range(num_prompt), max_tokens=8)
    engine.step()
    before = dict(engine.memory)
    engine.drain()
    # The twins wrote beyond the prompt only, each in a block of its own.
    changed = [slot for slot, value in before.items() if engine.memory[slot] != value]
    assert not changed
    outputs = set(map(tuple, engine.outputs.values()))
    assert len(outputs) == 1 and len(engine.outputs) == 5


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_id_used_again_inherits_nothing(make_engine, is_aborted):
    engine = make_engine(32, 4)
    engine.add("same", range(12), max_tokens=4)
    if is_aborted:
        engine.step()
        engine.scheduler.abort(["same"])
    else:
        engine.drain()
    engine.endings.clear()
    engine.add("same", range(40, 52), max_tokens=4)
    engine.drain()
    assert engine.endings["same"].num_cached_tokens == 0
    engine.add("other", range(12), max_tokens=4)
    engine.drain()
    assert engine.endings["other"].num_cached_tokens == 8
