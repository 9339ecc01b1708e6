"""Prompts from the cache answer as fresh ones do, and nobody writes into shared blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.output import SequenceOutput
from moe_serve.request import Request

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 11 + salt * 37 + 5) % 256 for i in range(length)]


def told(output: SequenceOutput) -> object:
    assert output.logprobs is not None
    return [(entry.token_id, entry.logprob, entry.top) for entry in output.logprobs]


def cached_contents(llm: LLM, ids: list[int]) -> dict[int, str]:
    """Block id -> digest of its keys and values, for the full blocks of this prompt."""
    request = Request(
        request_id="probe", prompt_token_ids=[*ids, 0], sampling=PARAMS, max_tokens=1, seed=0
    )
    digests = {}
    for block_id in llm.engine.scheduler.lanes[0].block_manager.find_prefix(request):
        parts = [
            tensor[block_id].numpy().tobytes()
            for kv in llm.engine.executor.runner.pool
            for tensor in (kv.keys_BsNh, kv.values_BsNh)
        ]
        digests[block_id] = hashlib.sha256(b"".join(parts)).hexdigest()
    return digests


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_wholly_cached_answers_the_same(random_model: Path, length: int) -> None:
    ids = prompt(length)
    folder = str(random_model)
    with LLM(folder, num_threads=1, enable_prefix_caching=False, dtype="float32") as llm:
        expected = told(llm.generate([ids], PARAMS)[0].outputs[0])
    with LLM(folder, num_threads=1, num_kv_blocks=32, dtype="float32") as llm:
        first = llm.generate([ids], PARAMS)[0].outputs[0]
        assert told(first) == expected and first.num_cached_tokens == 0
        before = cached_contents(llm, ids)
        assert len(before) == length // 16
        for _ in range(2):
            again = llm.generate([ids], PARAMS)[0].outputs[0]
            assert told(again) == expected
            assert again.num_cached_tokens == (length - 1) // 16 * 16
        twice = llm.generate([ids, ids], PARAMS)
        assert [told(one.outputs[0]) for one in twice] == [expected] * 2
        assert cached_contents(llm, ids) == before
        llm.engine.scheduler.check_integrity()


def test_a_small_pool_serves_many_prompts_and_the_first_again(random_model: Path) -> None:
    folder = str(random_model)
    prompts = [prompt(20, salt) for salt in range(60)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, num_threads=1, enable_prefix_caching=False) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    with LLM(folder, num_threads=1, num_kv_blocks=16, block_size=4) as llm:
        manager = llm.engine.scheduler.lanes[0].block_manager
        for number, ids in enumerate([*prompts, *prompts[:20]]):
            result = llm.generate([ids], params)[0].outputs[0]
            assert result.token_ids == expected[number % 60]
            llm.engine.scheduler.check_integrity()
            assert manager.num_free_blocks == manager.num_blocks
