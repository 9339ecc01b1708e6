"""Whole models on the GPU: the tokens of the CPU twins, and the same bits however they are run.

    python scripts/kernel_bench/model_check.py [--smoke]

Small models of every family, offline, through the engine. In fp32 the GPU's greedy tokens are those
of the CPU. In fp32 and bf16 each request has the same tokens and log-probabilities, bit for bit,
alone, in a batch, with its prompt in chunks, after preemption, and with captured steps or without.
Ends with 1 where that is not so. `--smoke`: on the CPU only, one model.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_serve import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 2, 15, 17, 33, 70)
_BLOCK_SIZE, _NUM_BLOCKS = 16, 64
# fp32 sums in other orders; the logits of these models are around ten.
_CLOSE = 1e-3
PREEMPTED = "preempted"
WAYS: dict[str, dict[str, Any]] = {
    "in a batch": {},
    "in chunks of 7": {"max_num_batched_tokens": 7},
    PREEMPTED: {"num_kv_blocks": 7},
}
_SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3}
Answer = list[tuple[int, float]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="on the CPU only, one model")
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device: there is nothing to compare with the CPU")
        return 2
    device = "cpu" if args.smoke else "cuda"
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models(Path(folder), is_smoke=args.smoke):
            began = time.monotonic()
            for what, is_right in check(model, device):
                print(f"{'yes' if is_right else 'NO ':3}  {name}: {what}", flush=True)
                failures += [] if is_right else [f"{name}: {what}"]
            print(f"     {name}: {time.monotonic() - began:.1f} s", flush=True)
    print(f"{len(failures)} failures")
    return 1 if failures else 0


def models(folder: Path, *, is_smoke: bool) -> Iterator[tuple[str, str]]:
    """Names and folders: random weights, and the model that comes with the package."""
    tiny = tiny_models()
    families = list(tiny.FAMILIES)[: 1 if is_smoke else None]
    for family in families:
        tiny.save_random_family(folder / family, family)
        tiny.save_byte_tokenizer(folder / family)
        yield family, str(folder / family)
    if not is_smoke:
        yield "builtin", "builtin"


def tiny_models() -> Any:
    """What the tests make them with."""
    spec = importlib.util.spec_from_file_location("tiny_models", ROOT / "tests" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(model: str, device: str) -> Iterator[tuple[str, bool]]:
    for dtype in ("float32", "bfloat16"):
        # Alone, and launch by launch where there is a choice.
        eager = {"enforce_eager": True} if device == "cuda" else {}
        with load(model, device, dtype, **eager) as llm:
            alone = [answers(llm, [number])[0] for number in range(len(LENGTHS))]
        if dtype == "float32":
            with load(model, "cpu", dtype) as llm:
                yield "fp32 tokens of the CPU", agree(alone, answers(llm, range(len(LENGTHS))))
        for way, options in WAYS.items():
            with load(model, device, dtype, **options) as llm:
                found = answers(llm, range(len(LENGTHS)))
                llm.engine.scheduler.check_integrity()
                is_counted = len({sum(row) for row in llm.expert_load}) == 1
                if way == PREEMPTED:
                    yield f"{dtype} {way} indeed", llm.engine.stats.num_preemptions > 0
            yield f"{dtype} {way}, the same bits as alone", found == alone
            yield f"{dtype} {way}, every layer counts as many tokens", is_counted


def load(model: str, device: str, dtype: str, **options: Any) -> LLM:
    defaults = {
        "num_kv_blocks": _NUM_BLOCKS,
        "block_size": _BLOCK_SIZE,
        "max_num_seqs": len(LENGTHS),
        "num_threads": 1,
        "enable_prefix_caching": False,
    }
    return LLM(model, device=device, dtype=dtype, **(defaults | options))


def answers(llm: LLM, numbers: Any) -> list[Answer]:
    """Of these requests in one batch: tokens, and the log-probability of each."""
    prompts = [[(7 * i * i + 3 * i + LENGTHS[n]) % 256 for i in range(LENGTHS[n])] for n in numbers]
    outputs = llm.generate(prompts, [params(number) for number in numbers])
    found = []
    for output in outputs:
        assert output.outputs[0].logprobs is not None
        found.append([(one.token_id, one.logprob) for one in output.outputs[0].logprobs])
    return found


def params(number: int) -> SamplingParams:
    """Greedy and sampled by turns."""
    how: dict[str, Any] = {"temperature": 0.0} if number % 2 == 0 else _SAMPLED
    return SamplingParams(max_tokens=24, logprobs=1, ignore_eos=True, **how)


def agree(found: list[Answer], expected: list[Answer]) -> bool:
    """The same tokens, at nearly the same log-probabilities."""
    for ours, theirs in zip(found, expected, strict=True):
        for (token, logprob), (other, wanted) in zip(ours, theirs, strict=True):
            if token != other or abs(logprob - wanted) > _CLOSE:
                print(f"     token {token} at {logprob:.6f}, not {other} at {wanted:.6f}")
                return False
    return True


if __name__ == "__main__":
    sys.exit(main())
