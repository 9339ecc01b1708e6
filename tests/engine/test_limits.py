"""What does not fit is refused or cut short, at once, and disturbs nobody."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moe_serve import LLM, SamplingParams
from moe_serve.errors import CheckpointError, ConfigError, ContextLengthError, RequestError

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
        ({"enforce_eager": True}, "--enforce-eager has no effect on cpu"),
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


def test_bad_logits_end_one_request_alone(random_model: Path) -> None:
    with LLM(str(random_model), num_threads=1, enable_prefix_caching=False) as llm:
        known = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
        llm.engine.executor.runner.model.embedding.weight_VD[120] = float("nan")
        scoring = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1)
        for params in (GREEDY, scoring):
            good, bad = llm.generate([[1, 2, 3], [5, 120, 6]], [GREEDY, params])
            assert bad.outputs[0].finish_reason == "error"
            assert "not finite" in str(bad.outputs[0].error)
            assert good.outputs[0].token_ids == known
        assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == known
        llm.engine.scheduler.check_integrity()


def test_a_request_that_masks_every_token_is_told_so(random_model: Path) -> None:
    bias = dict.fromkeys(range(320), -100.0)
    with LLM(str(random_model), num_threads=1) as llm:
        result = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=2, logit_bias=bias))
        # A bias of -100 shifts all tokens alike: it forbids none.
        assert result[0].outputs[0].finish_reason == "length"
        for field, limit in (("stop_token_ids", 256), ("logit_bias", 1024)):
            many = range(limit + 1)
            value = tuple(many) if field == "stop_token_ids" else dict.fromkeys(many, 1.0)
            with pytest.raises(RequestError, match=f"{field} has {limit + 1}.*{limit}"):
                SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 1}, "leaves no room"),
        ({"num_kv_blocks": 1, "block_size": 1}, "leaves no room"),
        ({"num_kv_blocks": 10**12}, "does not fit into the"),
    ],
)
def test_sizes_that_can_serve_nothing_are_refused(
    random_model: Path, options: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(random_model), **options)


def test_weights_that_overflow_are_refused_at_start(random_model: Path, tmp_path: Path) -> None:
    for file in random_model.iterdir():
        shutil.copy(file, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("inf"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="--dtype"):
        LLM(str(tmp_path))


def test_closing_twice_is_no_mistake(random_model: Path) -> None:
    with LLM(str(random_model), num_threads=1) as llm:
        llm.close()
    llm.close()


def test_prompts_are_one_or_several_texts_or_id_lists(random_model: Path) -> None:
    with LLM(str(random_model), num_threads=1) as llm:
        single = llm.generate("ab", GREEDY)[0].outputs[0].token_ids
        for prompts in ([97, 98], ["ab"], [[97, 98]], ([97, 98], "ab")):
            assert {tuple(r.outputs[0].token_ids) for r in llm.generate(prompts, GREEDY)} == {
                tuple(single)
            }
        assert llm.generate([], GREEDY) == []
        with pytest.raises(RequestError, match="mixes"):
            llm.generate([97, "ab"], GREEDY)  # type: ignore[list-item]
