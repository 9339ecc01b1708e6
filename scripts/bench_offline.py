"""Generation speed of `LLM` against transformers' `generate`, same model, same machine, same run.

    .venv/bin/python scripts/bench_offline.py [--model builtin] [--dtype bfloat16] [--pairs 3]

Greedy, 64 new tokens for each of 1 and 16 prompts of 64 tokens, and a long prompt with 8 new
tokens; interleaved pairs, medians of output tokens (or prompt tokens) a second.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from transformers import AutoModelForCausalLM

from moe_serve import LLM, SamplingParams
from moe_serve.bench.ruler import compare
from moe_serve.config import DTypeName

# prompts, prompt tokens, new tokens
LOADS = [(1, 64, 64), (16, 64, 64), (4, 512, 8)]


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(1, vocab_size, (count, length), generator=rng).tolist()
    return ids


def ours(llm: LLM, ids: list[list[int]], new: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate(ids, params)
    assert all(output.outputs[0].num_output_tokens == new for output in outputs)


def theirs(model: torch.nn.Module, ids: list[list[int]], new: int) -> None:
    inputs = torch.tensor(ids)
    model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    dtype: DTypeName = args.dtype
    llm = LLM(args.model, dtype=dtype, enable_prefix_caching=False)
    model = AutoModelForCausalLM.from_pretrained(llm.config.model, dtype=getattr(torch, dtype))
    print(f"{llm.engine.info.num_threads} threads, {dtype}")
    print("| prompts | in | out | ours tok/s | transformers tok/s | ratio |")
    print("|---|---|---|---|---|---|")
    for count, length, new in LOADS:
        ids = prompts(count, length, llm.engine.info.vocab_size, 0)
        found = compare(
            [partial(ours, llm, ids, new)], [partial(theirs, model, ids, new)], args.pairs
        )
        total = count * (new if new >= length else length + new)
        a, b = (total / one.median * 1e6 for one in (found.ours, found.theirs))
        print(
            f"| {count} | {length} | {new} | {a:.0f} | {b:.0f} | {found.ratio.median:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
