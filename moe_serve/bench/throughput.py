"""`moe-serve bench throughput`: all requests at once through the engine, without a server."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np

from moe_serve.bench import offline
from moe_serve.bench.engine_options import read_engine_config
from moe_serve.bench.ruler import Clock
from moe_serve.bench.table import Table
from moe_serve.errors import ConfigError, EngineError
from moe_serve.llm import LLM, Prompt
from moe_serve.sampling_params import SamplingParams

EPILOG = """\
Prompts are random tokens, other ones in each run, or those of --dataset-path. Every request gets
all its --output-len tokens, whatever they are. Prefixes are cached only with
--enable-prefix-caching. Tokens are turned into text, as they would be for a client."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds

    def rates(self) -> dict[str, float]:
        return {
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
            "total_tokens_per_second": self.total_tokens_per_second,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    offline.add_arguments(
        parser,
        {
            "num_prompts": (64, "requests of a run"),
            "input_len": (128, "tokens of a random prompt"),
            "output_len": (64, "tokens to generate for each"),
            "num_iters_warmup": (1, "runs before those that count"),
            "num_iters": (3, "runs"),
        },
    )
    parser.add_argument(
        "--dataset-path",
        metavar="FILE",
        help='prompts, a line each, or .jsonl with {"prompt": "..."}; repeated to --num-prompts',
    )


def run(args: argparse.Namespace) -> int:
    """Print each run and their median; returns the exit code."""
    names = ("num_prompts", "input_len", "output_len", "num_iters")
    offline.check_at_least(args, 1, *names)
    offline.check_at_least(args, 0, "num_iters_warmup", "seed")
    texts = None if args.dataset_path is None else offline.read_prompts(args.dataset_path)
    config = read_engine_config(args, prog="moe-serve bench throughput")
    with LLM(**config.engine_options()) as llm:
        print(offline.headline(llm.config, llm.engine.info), flush=True)
        runs = measure(
            llm,
            texts=texts,
            num_prompts=args.num_prompts,
            input_len=args.input_len,
            output_len=args.output_len,
            num_warm_up=args.num_iters_warmup,
            num_runs=args.num_iters,
            seed=args.seed,
        )
        print(table(runs))
        facts = offline.about(llm.config, llm.engine.info)
    # As given: the seed, the lengths, the file.
    facts["arguments"] = {name: getattr(args, name) for name in (*names, "dataset_path", "seed")}
    results = [dataclasses.asdict(one) | one.rates() for one in runs]
    offline.write_json(args.output_json, facts | {"runs": results, "median": medians(runs)})
    return 0


def measure(
    llm: LLM,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    num_runs: int,
    num_warm_up: int = 0,
    texts: Sequence[str] | None = None,
    seed: int = 0,
    clock: Clock = time.perf_counter_ns,
) -> list[Run]:
    """`texts`: prompts instead of random ones, repeated as often as needed."""
    info = llm.engine.info
    if texts is None:
        offline.check_fits(info, input_len, output_len)
    else:
        _check_texts(llm, texts, output_len)
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(num_warm_up + num_runs):
        prompts: list[Prompt] = []
        if texts is None:
            prompts += offline.random_prompts(rng, num_prompts, input_len, info.vocab_size)
        else:
            prompts += [texts[index % len(texts)] for index in range(num_prompts)]
        runs.append(_one_run(llm, prompts, output_len, clock))
    return runs[num_warm_up:]


def _check_texts(llm: LLM, texts: Sequence[str], output_len: int) -> None:
    most = llm.engine.info.max_model_len
    for number, text in enumerate(texts, start=1):
        length = len(llm.tokenizer.encode(text))
        if length + output_len > most:
            raise ConfigError(
                f"--output-len {output_len}: prompt {number} of {length} tokens leaves room for "
                f"{max(0, most - length)} in the context of {most}"
            )


def _one_run(llm: LLM, prompts: Sequence[Prompt], output_len: int, clock: Clock) -> Run:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    began = clock()
    results = llm.generate(prompts, params)
    seconds = (clock() - began) / 1e9
    outputs = [result.outputs[0] for result in results]
    for output in outputs:
        if output.finish_reason == "error":
            raise EngineError(output.error)
    return Run(
        seconds=seconds,
        num_requests=len(results),
        num_prompt_tokens=sum(len(result.prompt_token_ids) for result in results),
        num_output_tokens=sum(output.num_output_tokens for output in outputs),
    )


def medians(runs: Sequence[Run]) -> dict[str, float]:
    rates = [one.rates() for one in runs]
    return {name: statistics.median(rate[name] for rate in rates) for name in rates[0]}


def table(runs: Sequence[Run]) -> str:
    """A row of each run, and of the medians."""
    rows = Table(["run", "seconds", "requests/s", "output tok/s", "total tok/s"])
    for number, one in enumerate(runs, start=1):
        rows.add(number, f"{one.seconds:.2f}", *_cells(one.rates()))
    rows.add("median", f"{statistics.median(one.seconds for one in runs):.2f}",
             *_cells(medians(runs)))  # fmt: skip
    return str(rows)


def _cells(rates: dict[str, float]) -> list[str]:
    requests, output, total = rates.values()
    return [f"{requests:.2f}", f"{output:.1f}", f"{total:.1f}"]
