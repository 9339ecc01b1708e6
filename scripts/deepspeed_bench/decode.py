"""A decode step: `deepspeed.init_inference` and our engine, on the same random checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from deepspeed_bench.launched import launched
from deepspeed_bench.sides import Side, SideError
from moe_serve import LLM
from moe_serve.bench.table import Table
from moe_serve.messages import AddRequest
from moe_serve.sampling_params import SamplingParams

DEADLINE = 180.0
COLUMNS = ("dtype", "ranks", "sequences", "DeepSpeed ms", "ours ms", "DeepSpeed / ours",
           "tokens alike")  # fmt: skip


class Theirs:
    """`init_inference` of transformers' model; greedy steps with transformers' cache."""

    def __init__(self, folder: str, dtype: str, threads: int, injects: bool) -> None:
        import deepspeed
        import transformers
        from deepspeed import comm

        torch.set_num_threads(threads)
        # Of the name of its cache.
        warnings.simplefilter("ignore", FutureWarning)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            comm.init_distributed("gloo", timeout=datetime.timedelta(seconds=60), verbose=False)
        kind = getattr(torch, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
        before = {type(module) for module in model.modules()}
        engine = deepspeed.init_inference(
            model, tensor_parallel={"tp_size": size}, dtype=kind, replace_with_kernel_inject=injects
        )
        self._model = engine.module
        after = {type(module) for module in self._model.modules()}
        self.answer = ", ".join(sorted(found.__name__ for found in after - before)) or "nothing"

    def __call__(self, what: str, prompts: list[list[int]] | None, steps: int) -> Any:
        if what == "describe":
            return self.answer
        assert prompts is not None
        tokens: list[list[int]] = []
        with torch.no_grad():
            answer = self._model(torch.tensor(prompts), use_cache=True)
            last = answer.logits[:, -1:].argmax(-1)
            seconds = []
            for _ in range(steps):
                tokens.append(last.flatten().tolist())
                start = time.perf_counter()
                answer = self._model(last, past_key_values=answer.past_key_values, use_cache=True)
                last = answer.logits[:, -1:].argmax(-1)
                seconds.append(time.perf_counter() - start)
        tokens.append(last.flatten().tolist())
        return seconds, [list(row) for row in zip(*tokens, strict=True)]


class Ours:
    """The engine as it serves."""

    def __init__(self, folder: str, dtype: str, threads: int, ranks: int) -> None:
        self._llm = LLM(
            folder, dtype=dtype, num_threads=threads, tensor_parallel_size=ranks,
            max_model_len=1024, num_kv_blocks=2048, enable_prefix_caching=False,
        )  # fmt: skip

    def __call__(self, what: str, prompts: list[list[int]] | None, steps: int) -> Any:
        assert prompts is not None
        engine = self._llm.engine
        tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        for name, prompt in zip(tokens, prompts, strict=True):
            engine.add(AddRequest(request_id=name, prompt_token_ids=prompt, sampling=params))
        seconds = []
        while engine.has_work:
            is_decode = all(tokens.values())
            start = time.perf_counter()
            news = engine.step()
            if is_decode:
                seconds.append(time.perf_counter() - start)
            for update in news.updates:
                tokens[update.request_id] += update.token_ids
        return seconds, list(tokens.values())

    def close(self) -> None:
        self._llm.close()


def report(options: argparse.Namespace) -> None:
    print(f"Decode step: Qwen3-MoE of {options.layers} layers, {options.experts} experts of "
          f"{options.inner}, hidden {options.hidden}, top {options.top_k}; context "
          f"{options.context}, {options.cores} threads in all\n")  # fmt: skip
    table, answers = Table(COLUMNS), []
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, options)
        for dtype in options.dtypes.split(","):
            for size in (1, 2):
                lines, answer = compare(folder, dtype, size, options)
                answers.append(f"- {dtype}, {size} rank{'s' * (size > 1)}: {answer}")
                for line in lines:
                    table.add(*line)
    print(table, "\n\nWhat `init_inference` put in place of transformers' modules:\n", sep="")
    print("\n".join(answers), flush=True)


def make_checkpoint(folder: str, options: argparse.Namespace) -> None:
    script = Path(__file__).parents[1] / "random_checkpoint.py"
    flags = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("layers", "hidden", "experts", "top_k", "inner")
    ]
    command = [sys.executable, str(script), folder, *flags, "--vocab=4096"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compare(
    folder: str, dtype: str, size: int, options: argparse.Namespace
) -> tuple[list[list[str]], str]:
    """A line for each batch, and what DeepSpeed answered."""
    threads = max(1, options.cores // size)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Side(Ours, (folder, dtype, threads, size), [{}], DEADLINE))
        try:
            environments = stack.enter_context(launched(size))
            theirs = stack.enter_context(
                Side(Theirs, (folder, dtype, threads, options.injects), environments, DEADLINE)
            )
            answer = theirs("describe", None, 0)[0]
        except SideError as error:
            return [], str(error)
        batches = [int(batch) for batch in options.batches.split(",")]
        lines = [measure(theirs, ours, batch, options) for batch in batches]
    return [[dtype, str(size), *line] for line in lines], answer


def measure(theirs: Side, ours: Side, batch: int, options: argparse.Namespace) -> list[str]:
    prompts = [
        [(7 * i + 31 * number) % 256 for i in range(options.context)] for number in range(batch)
    ]
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    tokens = {}
    for turn in range(1 + options.rounds):
        for name, side in (("theirs", theirs), ("ours", ours)):
            results = side("time", prompts, options.steps)
            # A step is as long as its slowest rank's; the first round touches memory anew.
            seconds = [max(step) for step in zip(*(found for found, _ in results), strict=True)]
            tokens[name] = results[0][1]
            times[name] += seconds if turn else []
    medians = [1e3 * statistics.median(found) for found in times.values()]
    pairs = list(zip(sum(tokens["theirs"], []), sum(tokens["ours"], []), strict=True))
    alike = sum(one == other for one, other in pairs) / len(pairs)
    return [
        str(batch),
        f"{medians[0]:.2f}",
        f"{medians[1]:.2f}",
        f"{medians[0] / medians[1]:.2f}",
        f"{alike:.0%}",
    ]
