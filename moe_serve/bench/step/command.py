"""`moe-serve bench step`: where the time of one engine step goes."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from moe_serve.bench import offline
from moe_serve.bench.engine_options import read_engine_config
from moe_serve.bench.step import breakdown, targets
from moe_serve.bench.step.chrome_trace import chrome_trace, write_trace
from moe_serve.bench.step.load import DecodeLoad, Load, PrefillLoad
from moe_serve.bench.step.measure import Answerer, Measured, measure
from moe_serve.bench.step.probes import Recorder
from moe_serve.config import EngineConfig
from moe_serve.errors import ConfigError
from moe_serve.llm import LLM
from moe_serve.rank_setup import pick_device

EPILOG = """\
Times are a part's own: what other parts take inside it is theirs. A decode step's context is made
up, so a long one is there at once. Steps without probes and with them come by turns; how much
longer the latter take is told. Of one rank on the CPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", "--batch", type=int, default=None, metavar="N",
        help="requests that decode [8]",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=int, default=None, metavar="N", help="positions each of them sees [128]"
    )
    parser.add_argument(
        "--prefill", type=int, default=None, metavar="N", help="a prompt of that length instead"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="also what a server does with the messages of the step, in this process",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="also write all probed steps there, for ui.perfetto.dev"
    )
    offline.add_arguments(
        parser,
        {
            "num_iters_warmup": (5, "steps before those that count"),
            "num_iters": (40, "pairs of steps, one without probes and one with them"),
        },
    )


def run(args: argparse.Namespace) -> int:
    """Print the parts of a step; returns the exit code."""
    offline.check_at_least(args, 0, "num_iters_warmup", "seed")
    offline.check_at_least(args, 1, "num_iters")
    load = _load(args)
    config = load.fitting(read_engine_config(args, prog="moe-serve bench step"))
    _check_can_be_looked_into(config)
    with LLM(**config.engine_options()) as llm:
        print(f"{offline.headline(llm.config, llm.engine.info)}\n{load.name}\n", flush=True)
        measured = _measure(args, llm, load)
        facts = offline.about(llm.config, llm.engine.info)
    _print(measured)
    if args.trace is not None:
        _write_trace(args.trace, measured, load.name)
    offline.write_json(args.output_json, facts | _values(measured, load))
    return 0


def _load(args: argparse.Namespace) -> Load:
    rng = np.random.default_rng(args.seed)
    if args.prefill is not None:
        for name in ("batch_size", "context"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect with --prefill; drop one of them"
                )
        offline.check_at_least(args, 1, "prefill")
        return PrefillLoad(num_tokens=args.prefill, rng=rng)
    args.batch_size = 8 if args.batch_size is None else args.batch_size
    args.context = 128 if args.context is None else args.context
    offline.check_at_least(args, 1, "batch_size")
    offline.check_at_least(args, 2, "context")
    return DecodeLoad(batch_size=args.batch_size, context=args.context, rng=rng)


def _check_can_be_looked_into(config: EngineConfig) -> None:
    num_ranks = (config.tensor_parallel_size or 1) * config.data_parallel_size
    if num_ranks > 1:
        raise ConfigError(f"one rank can be looked into, not {num_ranks}; drop the sizes")
    device = pick_device(config.device)
    if device.type != "cpu":
        raise ConfigError(
            f"--device {config.device}: a GPU runs behind the host, whose clock cannot tell its "
            "parts; give --device cpu"
        )


def _measure(args: argparse.Namespace, llm: LLM, load: Load) -> Measured:
    recorder = Recorder()
    answerer = Answerer()
    if args.serve:
        # Here, since nothing else of it needs the libraries of the server.
        from moe_serve.bench.step.serving import ServedStep

        answerer = ServedStep(llm.tokenizer, recorder)
    return measure(
        llm.engine,
        load,
        num_steps=args.num_iters,
        num_warm_up=args.num_iters_warmup,
        answerer=answerer,
        recorder=recorder,
    )


def _print(measured: Measured) -> None:
    parts = breakdown.in_order(breakdown.part_times(measured.steps), targets.PARTS)
    print(breakdown.parts_table(f"part of {len(measured.steps)} steps", parts))
    served = _served(measured)
    if served:
        print()
        print(breakdown.parts_table("beside each step; share of it", served, has_sum=False))
    print(f"\n{measured.overhead}")


def _served(measured: Measured) -> list[breakdown.PartTime]:
    total = sum(event.own_ns for events in measured.steps for event in events)
    return breakdown.part_times(measured.served, total_ns=total)


def _write_trace(path: str, measured: Measured, name: str) -> None:
    tracks = {"engine": [event for events in measured.steps for event in events]}
    served = [event for events in measured.served for event in events]
    if served:
        tracks["server, measured in this process"] = served
    write_trace(path, chrome_trace(tracks, f"moe-serve: {name}"))


def _values(measured: Measured, load: Load) -> dict[str, Any]:
    overhead = measured.overhead
    return {
        "load": load.name,
        "plain_us": overhead.plain._asdict(),
        "probed_us": overhead.probed._asdict(),
        "probed_to_plain": overhead.ratio._asdict(),
        "num_probes": overhead.num_probes,
        "probe_us": overhead.probe_us,
        "parts": breakdown.values(breakdown.part_times(measured.steps)),
        "served": breakdown.values(_served(measured)),
    }
