"""Keys and values in fp8: more tokens in the same memory, and the same promise of exactness."""

from __future__ import annotations

import torch

from moe_serve import LLM, SamplingParams
from moe_serve.executor import LocalExecutor

PROMPTS = [[(7 * i + n) % 256 for i in range(n)] for n in (1, 16, 37, 70)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=0)


def told(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    outputs = [one.outputs[0] for one in llm.generate(prompts, GREEDY)]
    return [[(entry.token_id, entry.logprob) for entry in out.logprobs or []] for out in outputs]


def test_fp8_gives_the_same_bits_however_a_request_runs() -> None:
    common = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "num_threads": 1}
    with LLM("builtin", enable_prefix_caching=False, **common) as llm:
        alone = [told(llm, [prompt])[0] for prompt in PROMPTS]
    with LLM("builtin", max_num_batched_tokens=19, block_size=8, **common) as llm:
        assert told(llm, PROMPTS) == alone
        # From the prefix cache.
        assert told(llm, PROMPTS) == alone
    # 160 slots: requests push each other out and come back.
    with LLM("builtin", block_size=4, num_kv_blocks=40, max_model_len=96, **common) as llm:
        assert told(llm, PROMPTS) == alone
        assert llm.engine.stats.num_preemptions


def test_fp8_holds_twice_the_tokens_of_bfloat16() -> None:
    blocks = []
    for kv_dtype in ("auto", "fp8"):
        with LLM("builtin", dtype="bfloat16", kv_cache_dtype=kv_dtype, num_threads=1) as llm:
            blocks.append(llm.engine.info.num_kv_blocks)
            executor = llm.engine.executor
            assert isinstance(executor, LocalExecutor)
            pool = executor.runner.pool
    assert blocks[1] == 2 * blocks[0]
    assert pool[0].keys_BsNh.dtype == torch.float8_e4m3fn
