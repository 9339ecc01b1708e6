#!/usr/bin/env python3
"""What fewer bits cost: a model's perplexity on a text, for each --quantization and group size.

    scripts/bench_quality.py --text stories_valid.txt.gz [--model builtin] [--tokens 32768]

Prints a Markdown table. The text (.txt or .gz) should be one that the model was not trained on;
documents in it are separated by a line `<|endoftext|>`. It is cut into windows, each of which the
model reads from its start. "agree": positions at which the likeliest token is that of all bits.
"""

from __future__ import annotations

import argparse
import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from moe_serve import LLM, SamplingParams
from moe_serve.bench.table import Table
from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.cpu.quantized import Scheme
from moe_serve.models import packing
from moe_serve.tokenizer import Tokenizer

# Name -> option, and what it means for layers and for the LM head.
VARIANTS: dict[str, tuple[str | None, Scheme, Scheme]] = {
    "bfloat16": (None, Scheme(8, 128), Scheme(8, 128)),
    "int8": ("int8", Scheme(8, 128), Scheme(8, 128)),
    "int8, rows by 32": ("int8", Scheme(8, 32), Scheme(8, 32)),
    "int4 by 128": ("int4", Scheme(4, 128), Scheme(8, 128)),
    "int4 by 64": ("int4", Scheme(4, 64), Scheme(8, 128)),
    "int4 by 32": ("int4", Scheme(4, 32), Scheme(8, 128)),
    "int4 by 128, head too": ("int4", Scheme(4, 128), Scheme(4, 128)),
    "int4 by 32, head too": ("int4", Scheme(4, 32), Scheme(4, 32)),
}


class Scores(NamedTuple):
    """Of each token but the first of its window. `num_bytes` of weights that are multiplied."""

    logprobs: list[float]
    likeliest: list[int]
    num_bytes: int


def windows(file: Path, tokenizer: Tokenizer, length: int, most: int) -> list[list[int]]:
    opener: Any = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as stream:
        text = stream.read()
    ids = [token for part in documents(text) for token in tokenizer.encode(part)][:most]
    return [ids[start : start + length] for start in range(0, len(ids) - 1, length)]


def documents(text: str) -> Iterator[str]:
    return (part.strip("\n") for part in text.split("<|endoftext|>") if part.strip())


def score(model: str, variant: str, cuts: list[list[int]]) -> Scores:
    option, scheme, head = VARIANTS[variant]
    with (
        mock.patch.dict(packing.SCHEMES, {option or "": scheme}),
        mock.patch.object(packing, "HEAD_SCHEME", head),
        LLM(model, quantization=option, enable_prefix_caching=False) as llm,
    ):
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        entries = [
            entry
            for output in llm.generate(cuts, params)
            for entry in output.outputs[0].prompt_logprobs or []
            if entry is not None
        ]
        return Scores(
            [entry.logprob for entry in entries],
            [entry.top[0].token_id for entry in entries],
            packed_bytes(llm),
        )


def packed_bytes(llm: LLM) -> int:
    model: Any = llm.engine.executor.runner.model  # type: ignore[attr-defined]
    found = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, PackedWeight)
    ]
    return sum(weight.nbytes for weight in found)


def perplexity(scores: Scores) -> float:
    return math.exp(-math.fsum(scores.logprobs) / len(scores.logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--tokens", type=int, default=32768, help="of the text, at most")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    args = parser.parse_args()
    with LLM(args.model) as llm:
        cuts = windows(args.text, llm.tokenizer, args.window, args.tokens)
    base = score(args.model, "bfloat16", cuts)
    table = Table(["weights", "MiB", "perplexity", "more", "agree"])
    for variant in dict.fromkeys(["bfloat16", *args.variants]):
        found = base if variant == "bfloat16" else score(args.model, variant, cuts)
        agreeing = sum(a == b for a, b in zip(found.likeliest, base.likeliest, strict=True))
        table.add(
            variant,
            f"{found.num_bytes / 2**20:.1f}",
            f"{perplexity(found):.3f}",
            f"{perplexity(found) / perplexity(base) - 1:+.2%}",
            f"{agreeing / len(base.likeliest):.1%}",
        )
    print(f"{len(base.logprobs):,} tokens of {args.text.name}, {args.model}\n\n{table}")


if __name__ == "__main__":
    main()
