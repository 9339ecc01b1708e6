"""The flags of `moe-serve bench serve`: what they are, and which go together."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from moe_serve.bench.serving.bodies import PATHS
from moe_serve.errors import ConfigError
from moe_serve.options import variable

INPUT_LEN = OUTPUT_LEN = 128
NUM_PROMPTS = 100


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number, {least} or more")
        return number

    return read


def positive(text: str) -> float:
    """Reads a number above 0; "inf" is one."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def finite(text: str) -> float:
    """Reads a number above 0 that is not infinite."""
    number = positive(text)
    if math.isinf(number):
        raise argparse.ArgumentTypeError(f"{text} must not be infinite")
    return number


def share(text: str) -> float:
    """Reads a number from 0 to below 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more and below 1")
    return number


def json_object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"{text} must be a JSON object")
    return values


def add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="[%(default)s]")
    add(
        "--compare",
        metavar="NAME=URL",
        action="append",
        help="measure several servers in turns, A B A B, with the same load; repeatable",
    )
    add("--model", metavar="NAME", help="[the first of /v1/models]")
    add(
        "--endpoint",
        choices=list(PATHS),
        metavar="NAME",
        default="completions",
        help="completions or chat [%(default)s]",
    )
    add("--api-key", metavar="KEY", help=f"the server's; default: {variable('api_key')}")
    add("--timeout", type=finite, metavar="S", default=3600.0, help="of a request [%(default)g]")


def add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add(
        "--num-prompts",
        type=whole(1),
        metavar="N",
        help=f"requests in a run [{NUM_PROMPTS}, or all of --prompts]",
    )
    add("--max-concurrency", type=whole(1), metavar="C", help="requests at once [no limit]")
    add("--request-rate", type=positive, metavar="R", help="arrivals per second [inf: all at once]")
    add(
        "--burstiness",
        type=finite,
        metavar="B",
        help="of arrivals: 1 Poisson, less in bursts, more even [1]",
    )
    add(
        "--warmup",
        type=whole(0),
        metavar="N",
        help="requests before the first run [--max-concurrency, or 1]",
    )
    add("--runs", type=whole(1), metavar="R", default=1, help="runs of each server [%(default)s]")
    add("--seed", type=whole(0), metavar="N", default=0, help="of prompts and arrivals [0]")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--input-len", type=whole(1), metavar="N", help=f"tokens of a prompt [{INPUT_LEN}]")
    add("--output-len", type=whole(1), metavar="N", help=f"tokens of an answer [{OUTPUT_LEN}]")
    add("--range-ratio", type=share, metavar="X", help="lengths vary by this share up or down [0]")
    add(
        "--shared-prefix-len",
        type=whole(0),
        metavar="N",
        help="tokens before, the same in all prompts of a run [0]",
    )
    add("--same-prompts", action="store_true", help="in each run, so that a prefix cache can help")
    add(
        "--prompt-tokens",
        choices=("ids", "text"),
        metavar="KIND",
        help="ids or text [ids; text for chat]",
    )
    add("--tokenizer", metavar="PATH", help="tokenizer.json, or its folder [ask the server]")
    add("--vocab-size", type=whole(2), metavar="N", help="draw ids below N [ask the server]")
    add(
        "--prompts",
        metavar="FILE",
        help='the same in each run: JSON lines with "prompt" or "messages", and "max_tokens"; or '
        "lines of text",
    )
    add("--no-ignore-eos", action="store_true", help="let answers end where the model ends them")
    add("--extra-body", type=json_object, metavar="JSON", help="merged into each request")


def add_trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("trace").add_argument
    add("--trace", metavar="FILE", help="replay arrivals and lengths: Azure CSV, Mooncake JSONL")
    add("--trace-speed", type=finite, metavar="X", help="times faster than it was [1]")
    add("--trace-limit", type=whole(1), metavar="N", help="most requests [all]")
    add("--trace-seconds", type=finite, metavar="S", help="of the trace, before --trace-speed")
    add(
        "--trace-max-len",
        type=whole(2),
        metavar="N",
        help="leave out requests of more tokens, prompt and answer",
    )
    add("--trace-scale", type=finite, metavar="X", help="multiply lengths by this [1]")


def add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--goodput",
        nargs="+",
        metavar="KEY:MS",
        help="count requests within all of ttft:MS tpot:MS e2el:MS",
    )
    add("--save-json", metavar="FILE", help="all numbers of all runs")
    add("--plot", metavar="FILE", help="how latencies are spread, as SVG")


# What a flag needs, or bears not: (flag, wanted, there or not, what to do instead).
_MADE_UP = ("input_len", "range_ratio", "shared_prefix_len")
_OF_TRACE = ("trace_speed", "trace_limit", "trace_seconds", "trace_max_len", "trace_scale")
_IDLE = [
    *((name, "trace", False, "") for name in _OF_TRACE),
    *((name, "trace", True, "the trace has the lengths") for name in (*_MADE_UP, "output_len")),
    *((name, "prompts", True, "the file has the prompts") for name in _MADE_UP),
    *((name, "prompts", True, "the file has the prompts")
      for name in ("prompt_tokens", "tokenizer", "vocab_size", "same_prompts")),
    ("prompts", "trace", True, "the trace makes the prompts"),
    ("num_prompts", "trace", True, "use --trace-limit"),
    ("request_rate", "trace", True, "use --trace-speed"),
    ("burstiness", "request_rate", False, ""),
    ("vocab_size", "tokenizer", True, "the tokenizer has the vocabulary"),
]  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for a flag that would do nothing."""
    for name, other, is_with, advice in _IDLE:
        is_given = getattr(options, name) not in (None, False)
        if is_given and (getattr(options, other) is not None) == is_with:
            word = "with" if is_with else "without"
            raise ConfigError(
                f"{_flag(name)} has no effect {word} {_flag(other)}{advice and '; '}{advice}"
            )
    if options.burstiness is not None and math.isinf(options.request_rate):
        raise ConfigError("--burstiness has no effect at --request-rate inf")
    if options.same_prompts and options.runs == 1:
        raise ConfigError("--same-prompts has no effect with one run; give --runs")
    is_ids = options.prompt_tokens == "ids"
    if options.endpoint == "chat" and (is_ids or options.vocab_size is not None):
        given = "--prompt-tokens ids" if is_ids else "--vocab-size"
        raise ConfigError(f"{given} has no effect with --endpoint chat, which takes text")
    if options.prompt_tokens == "text" and options.vocab_size is not None:
        raise ConfigError("--vocab-size has no effect with --prompt-tokens text; use --tokenizer")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
