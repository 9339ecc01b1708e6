"""What does not fit is refused or cut short, at once, and disturbs nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.errors import ConfigError, ContextLengthError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_a_pool_smaller_than_the_context_lowers_the_context(random_model: Path) -> None:
    with LLM(str(random_model), num_kv_blocks=8, block_size=16, num_threads=1) as llm:
        assert llm.engine.info.max_model_len == 128
        for length in (96, 112, 126, 127):
            (result,) = llm.generate([[7] * length], GREEDY)
            assert result.outputs[0].num_output_tokens == min(4, 128 - length)
        for length in (128, 129, 200):
            with pytest.raises(ContextLengthError, match=rf"{length}.*128"):
                llm.generate([[7] * length], GREEDY)
        assert not llm.engine.has_work
        assert llm.generate([[7] * 10], GREEDY)[0].outputs[0].num_output_tokens == 4
        llm.engine.scheduler.check_integrity()


def test_growth_beyond_the_pool_ends_with_length(random_model: Path) -> None:
    with LLM(str(random_model), num_kv_blocks=10, block_size=4, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        (result,) = llm.generate([[7] * 30], params)
        assert (result.outputs[0].finish_reason, result.outputs[0].num_output_tokens) == (
            "length", 10,
        )  # fmt: skip
        both = llm.generate([[7] * 16, [8] * 16], SamplingParams(temperature=0, max_tokens=20))
        assert [one.outputs[0].num_output_tokens for one in both] == [20, 20]
        assert llm.engine.stats.num_preemptions < 10


@pytest.mark.parametrize("length", [62, 63, 64, 65])
@pytest.mark.parametrize("max_tokens", [1, 2, 10, None])
def test_prompt_and_output_share_the_context(
    random_model: Path, length: int, max_tokens: int | None
) -> None:
    with LLM(str(random_model), max_model_len=64, num_kv_blocks=16, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        if length >= 64:
            with pytest.raises(ContextLengthError):
                llm.generate([[7] * length], params)
            return
        (result,) = llm.generate([[7] * length], params)
        room = 64 - length
        assert result.outputs[0].num_output_tokens == min(room, max_tokens or room)
        assert result.outputs[0].finish_reason == "length"


def test_a_request_that_is_refused_leaves_its_neighbours_alone(random_model: Path) -> None:
    with LLM(str(random_model), num_threads=1) as llm:
        known = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
        for bad in ([320], [-1], [2**63 - 1], []):
            with pytest.raises(RequestError, match="prompt"):
                llm.generate([[1, 2, 3], bad], GREEDY)
        for field in ({"stop_token_ids": [320]}, {"logit_bias": {-1: 1.0}}, {"logprobs": 21}):
            with pytest.raises(RequestError, match=next(iter(field))):
                llm.generate([[1]], SamplingParams(**field))  # type: ignore[arg-type]
        assert not llm.engine.has_work
        assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == known


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 257}, "257.*256"),
        ({"kv_cache_memory": "1KiB"}, "1024.*kv-cache-memory"),
        ({"no_such": 1}, "no_such"),
        ({"gpu_memory_utilization": 0.5}, "no effect on cpu.*kv-cache-memory"),
        ({"device": "cuda"}, "CUDA"),
    ],
)
def test_options_that_cannot_work_name_the_fix(
    random_model: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(random_model), **options)


def test_a_prompt_may_be_evaluated_without_output(random_model: Path) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with LLM(str(random_model), num_threads=1, max_num_batched_tokens=16, block_size=4) as llm:
        cold = llm.generate([list(range(40))], params)[0].outputs[0]
        warm = llm.generate([list(range(40))], params)[0].outputs[0]
        assert cold.token_ids == []
        assert cold.prompt_logprobs is not None and len(cold.prompt_logprobs) == 40
        assert cold.prompt_logprobs[0] is None
        assert warm.prompt_logprobs == cold.prompt_logprobs
