"""`moe-serve bench kernels`: the operations of a step on the CPU, beside the machine's limits."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from moe_serve.bench import offline
from moe_serve.bench.engine_options import add_engine_arguments, read_engine_config
from moe_serve.bench.kernels import against, rows
from moe_serve.bench.kernels.cases import OPS, all_cases
from moe_serve.bench.kernels.rig import Rig, Sizes, make_rig
from moe_serve.bench.limits import Limits, limits_table
from moe_serve.bench.processor import processor_name
from moe_serve.config import EngineConfig, flag
from moe_serve.errors import ConfigError
from moe_serve.option_parser import closest

EPILOG = """\
This measures the CPU; scripts/bench_kernels.py measures a GPU. Weights are made up, in the shapes
of the model, as many layers as it has: calls take turns over them, as in a step. Bytes and
operations are the least that must be moved and done. `in cache`: all that the calls read fits the
last cache, so that memory is no limit."""
TOKENS = "1,8,64,512"
# The options of an engine that change what is measured here.
ENGINE_OPTIONS = (
    "model", "revision", "dtype", "num_threads", "cpu_kernels", "block_size", "max_num_seqs",
)  # fmt: skip
_SIZES = {
    "hidden": "size of the stream",
    "inner": "inner size of an expert",
    "experts": "experts of a layer",
    "top_k": "experts of a token",
    "layers": "layers that calls take turns over",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ops", default=",".join(OPS), metavar="OP,OP", help="some of: " + ", ".join(OPS)
    )
    parser.add_argument(
        "--tokens", default=TOKENS, metavar="T,T", help=f"tokens of a step [{TOKENS}]"
    )
    parser.add_argument(
        "--context", type=int, default=512, metavar="N",
        help="positions that a token of attention decode sees [512]",
    )  # fmt: skip
    for name, text in _SIZES.items():
        parser.add_argument(
            flag(name), type=int, metavar="N", help=f"{text}, instead of the model's"
        )
    parser.add_argument(
        "--against", choices=["torch"], metavar="torch",
        help="also compare the MoE layer with what torch offers, pair by pair",
    )  # fmt: skip
    parser.add_argument("--pairs", type=int, default=11, metavar="N", help="with --against [11]")
    parser.add_argument(
        "--seconds", type=float, default=0.5, metavar="X", help="about so long for each case [0.5]"
    )
    parser.add_argument("--output-json", metavar="FILE", help="also write the results there")
    add_engine_arguments(parser, ENGINE_OPTIONS)


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Print limits, times and comparisons; returns the exit code."""
    ops, tokens = _ops(args.ops), _tokens(args.tokens)
    offline.check_at_least(args, 1, "context", "pairs")
    sizes = Sizes(**{name: _size(args, name) for name in _SIZES})
    if not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds} must be above 0")
    config = read_engine_config(args, prog="moe-serve bench kernels")
    torch.manual_seed(0)
    rig = make_rig(config, sizes, keeps_plain=args.against is not None)
    print(_headline(rig, config), flush=True)
    before = Limits.measure()
    print(f"\n{limits_table(before)}\n", flush=True)
    found = _time_all(args, rig, ops, tokens, config.max_num_seqs, before)
    compared = _compare_all(args, rig, tokens)
    after = Limits.measure()
    print(limits_table(before, after))
    offline.write_json(
        args.output_json,
        offline.about_machine()
        | {
            "limits": {"before": dataclasses.asdict(before), "after": dataclasses.asdict(after)},
            "rows": [row.values() for row in found],
            "against": [_match_values(match) for match in compared],
        },
    )
    return 0


def _time_all(
    args: argparse.Namespace,
    rig: Rig,
    ops: list[str],
    tokens: list[int],
    max_num_seqs: int,
    limits: Limits,
) -> list[rows.Row]:
    cache_bytes = rows.last_cache_bytes()
    cases = all_cases(rig, ops, tokens, context=args.context, max_num_seqs=max_num_seqs)
    found = [rows.time_case(case, limits, cache_bytes, args.seconds * 1e6) for case in cases]
    print(f"{rows.rows_table(found)}\n", flush=True)
    return found


def _compare_all(args: argparse.Namespace, rig: Rig, tokens: list[int]) -> list[against.Match]:
    if args.against is None:
        return []
    found = [
        match for num_tokens in tokens for match in against.matches(rig, num_tokens, args.pairs)
    ]
    print(f"{rows.matches_table(found)}\n", flush=True)
    return found


def _ops(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    for op in chosen:
        if op not in OPS:
            raise ConfigError(f"--ops {op!r} is not one of {', '.join(OPS)}{closest(op, OPS)}")
    return chosen


def _tokens(text: str) -> list[int]:
    try:
        tokens = [int(part) for part in text.split(",")]
    except ValueError:
        tokens = [0]
    if min(tokens) < 1:
        raise ConfigError(f"--tokens {text!r} must be whole numbers from 1 on, as {TOKENS}")
    return tokens


def _size(args: argparse.Namespace, name: str) -> int | None:
    if getattr(args, name) is not None:
        offline.check_at_least(args, 1, name)
    value: int | None = getattr(args, name)
    return value


def _headline(rig: Rig, config: EngineConfig) -> str:
    spec = rig.spec
    name = str(rig.dtype).removeprefix("torch.")
    return (
        f"{processor_name()}, {torch.get_num_threads()} threads, {name}, "
        f"--cpu-kernels {config.cpu_kernels}; {len(spec.layers)} layers of "
        f"{spec.num_parameters / len(spec.layers) / 1e6:.1f} M parameters"
    )


def _match_values(match: against.Match) -> dict[str, Any]:
    found = match.comparison
    return {
        "name": match.name,
        "tokens": match.tokens,
        "difference": match.error,
        "ours_us": found.ours._asdict(),
        "theirs_us": found.theirs._asdict(),
        "theirs_to_ours": found.ratio._asdict(),
    }
