"""A large request at the front of the queue blocks nobody, and is not forgotten either."""

from __future__ import annotations

from moe_serve.request_queue import MAX_OVERTAKES


def fill(make_engine, block_size: int, num_steps: int):
    """One request that holds 20 of 32 blocks all the time, and one behind it that needs 20."""
    engine = make_engine(32, block_size, max_num_batched_tokens=32 * block_size, max_num_seqs=32)
    engine.add("runner", range(20 * block_size - num_steps), max_tokens=num_steps)
    engine.step()
    assert engine.manager.num_free_blocks == 12
    engine.add("large", range(7, 7 + 20 * block_size), max_tokens=3)
    return engine


def add_small(engine, number: int) -> None:
    """Needs two blocks, for five steps."""
    num_prompt = engine.manager.block_size + 1
    engine.add(f"small {number}", range(number, number + num_prompt), max_tokens=5)


def started_before_large(engine) -> int:
    large = engine.start_steps["large"]
    return sum(step < large for step in engine.start_steps.values())


def test_small_requests_start_while_a_large_one_waits_for_room(make_engine):
    engine = fill(make_engine, block_size=256, num_steps=200)
    for number in range(5):
        add_small(engine, number)
    first = engine.step()
    assert len(first.chunks) == 6 and "large" not in engine.start_steps
    engine.drain()
    assert len(engine.outputs["runner"]) == 200
    assert engine.start_steps["large"] == 201


def test_a_trickle_of_small_requests_does_not_starve_the_large_one(make_engine):
    engine = fill(make_engine, block_size=64, num_steps=60)
    number = 0
    while "runner" not in engine.endings:
        add_small(engine, number)
        number += 1
        engine.step()
    freed = engine.num_steps
    while "large" not in engine.start_steps:
        add_small(engine, number)
        number += 1
        engine.step()
    # Those that overtook it are at their ends, and nothing else comes between.
    assert engine.start_steps["large"] - freed <= 5
    assert started_before_large(engine) == 1 + MAX_OVERTAKES
    engine.drain()
    assert len(engine.endings) == number + 2


def test_overtaking_ends_even_if_there_is_always_a_small_one_that_fits(make_engine):
    engine = make_engine(32, 4, max_num_seqs=32)
    engine.add("runner", range(60), max_tokens=4)
    engine.step()
    engine.add("large", range(100, 220), max_tokens=2)
    for index in range(60):
        engine.add(f"small {index}", [index], max_tokens=3 + index % 5)
        engine.step()
    engine.drain()
    assert started_before_large(engine) == 1 + MAX_OVERTAKES
