"""A request gets the same tokens, and the same bits of logprob, however it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.output import SequenceOutput

LENGTHS = [1, 2, 7, 15, 16, 17, 31, 33, 48, 64, 70, 5]


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + length) % 256 for i in range(length)]


def all_params() -> list[SamplingParams]:
    """Greedy, seeded, penalised and filtered requests, side by side."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0},
        {"seed": 3, "temperature": 1.0},
        {"temperature": 0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"seed": 42, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "presence_penalty": 0.5},
    ]
    return [
        SamplingParams(max_tokens=24, logprobs=2, **kinds[i % len(kinds)])  # type: ignore[arg-type]
        for i in range(len(LENGTHS))
    ]


def told(output: SequenceOutput) -> list[tuple[int, float]]:
    assert output.logprobs is not None
    return [(entry.token_id, entry.logprob) for entry in output.logprobs]


PROMPTS = [prompt(n) for n in LENGTHS]


class Alone:
    """Each request by itself, in a roomy engine without a prefix cache."""

    def __init__(self, folder: Path | str, dtype: str) -> None:
        self.folder, self.dtype = str(folder), dtype
        with LLM(self.folder, dtype=dtype, num_threads=1, enable_prefix_caching=False) as llm:
            self.answers = [
                told(llm.generate(ids, params)[0].outputs[0])
                for ids, params in zip(PROMPTS, all_params(), strict=True)
            ]

    def engine(self, **options: object) -> LLM:
        return LLM(self.folder, dtype=self.dtype, num_threads=1, **options)

    def check(self, llm: LLM, copies: int = 1) -> None:
        results = llm.generate(PROMPTS * copies, all_params() * copies)
        answers = [told(result.outputs[0]) for result in results]
        assert answers == self.answers * copies
        llm.engine.scheduler.check_integrity()


MODELS = [
    (name, dtype)
    for name in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "builtin")
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda param: "-".join(param))
def alone(request: pytest.FixtureRequest, random_family: Callable[[str], Path]) -> Iterator[Alone]:
    name, dtype = request.param
    yield Alone("builtin" if name == "builtin" else random_family(name), dtype)


def test_in_a_batch_of_mixed_lengths(alone: Alone) -> None:
    with alone.engine() as llm:
        alone.check(llm, copies=3)


@pytest.mark.parametrize("chunk", [7, 512])
def test_with_prompts_in_chunks(alone: Alone, chunk: int) -> None:
    with alone.engine(max_num_batched_tokens=chunk) as llm:
        alone.check(llm)


@pytest.mark.parametrize("block_size", [4, 16])
def test_after_forced_preemption(alone: Alone, block_size: int) -> None:
    with alone.engine(num_kv_blocks=112 // block_size, block_size=block_size) as llm:
        alone.check(llm)
        assert llm.engine.stats.num_preemptions > 0


def test_after_a_prefix_cache_hit(alone: Alone) -> None:
    with alone.engine(block_size=4) as llm:
        alone.check(llm)
        before = llm.engine.stats.prefix_cache_hits
        alone.check(llm)
        assert llm.engine.stats.prefix_cache_hits - before >= sum(n - 4 for n in LENGTHS if n > 4)


def test_every_routed_token_is_counted_once(alone: Alone) -> None:
    with alone.engine(num_kv_blocks=28, block_size=4, max_num_batched_tokens=19) as llm:
        scheduled = 0
        schedule = llm.engine.scheduler.schedule

        def counted(**options: bool) -> object:
            nonlocal scheduled
            plan = schedule(**options)
            scheduled += plan.num_tokens if plan is not None else 0
            return plan

        llm.engine.scheduler.schedule = counted  # type: ignore[method-assign, assignment]
        alone.check(llm)
        assert llm.engine.stats.num_recomputed_tokens > 0
        assert [sum(row) for row in llm.expert_load] == [scheduled * 2] * len(llm.expert_load)
