"""`moe-serve bench serve`: measure a running server, or several in turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

from moe_serve.bench.serving import flags
from moe_serve.bench.serving.curves import latency_curves
from moe_serve.bench.serving.figures import figures
from moe_serve.bench.serving.goodput import parse_objectives
from moe_serve.bench.serving.loads import Load
from moe_serve.bench.serving.measure import Procedure, measure
from moe_serve.bench.serving.planning import make_load, read_inputs
from moe_serve.bench.serving.report import Document, Measured, document
from moe_serve.bench.serving.runner import Observed
from moe_serve.bench.serving.targets import Target, find_target, ids_of, parse_urls
from moe_serve.errors import ConfigError
from moe_serve.options import variable

EPILOG = """\
Requests are streamed; times are taken when bytes arrive. TTFT: until the first token. ITL: between
tokens. TPOT: mean of that in one request. E2EL: until the last token. Tokens are counted by the
server where it does so. --request-rate and --max-concurrency may go together: what is due then
waits until it may be sent, and its times begin there; the report tells how long that was.
The load goes through no proxy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_server(parser)
    flags.add_load(parser)
    flags.add_prompts(parser)
    flags.add_trace(parser)
    flags.add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 where a server gave no good answer in one of its runs."""
    flags.check(options)
    objectives = parse_objectives(options.goodput)
    urls = parse_urls(options.base_url, options.compare)
    inputs = read_inputs(options)
    api_key = options.api_key or os.environ.get(variable("api_key"))
    targets = [find_target(name, url, options.model, api_key) for name, url in urls]
    load = make_load(options, inputs, lambda: ids_of(targets, api_key, options.seed))
    observed = _measure(targets, load, _procedure(options, api_key))
    measured = [
        Measured(target=target, runs=[figures(each, objectives) for each in observed[target.name]])
        for target in targets
    ]
    report = document(measured, vars(options), len(load.due), inputs.num_left_out)
    _print(report)
    if options.save_json is not None:
        _write("--save-json", options.save_json, json.dumps(report, indent=1, allow_nan=False))
    if options.plot is not None:
        outcomes = {
            name: [outcome for run in runs for outcome in run.outcomes]
            for name, runs in observed.items()
        }
        _write("--plot", options.plot, latency_curves(outcomes))
    return 0 if all(each["completed"] for one in measured for each in one.runs) else 1


def _procedure(options: argparse.Namespace, api_key: str | None) -> Procedure:
    num_warmup = options.warmup
    return Procedure(
        num_runs=options.runs,
        num_warmup=options.max_concurrency or 1 if num_warmup is None else num_warmup,
        max_concurrency=options.max_concurrency,
        is_same_each_run=options.same_prompts,
        timeout=options.timeout,
        api_key=api_key,
    )


def _measure(
    targets: Sequence[Target], load: Load, procedure: Procedure
) -> dict[str, list[Observed]]:
    """With a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    each = min(procedure.num_warmup, len(load.due)) + procedure.num_runs * len(load.due)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=each * len(targets))

        def on_request(part: str) -> None:
            progress.update(task, advance=1, description=part)

        return asyncio.run(measure(targets, load, procedure, on_request))


def _print(report: Document) -> None:
    from rich.console import Console

    from moe_serve.bench.serving.terminal import print_report

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=120)
    print_report(report, console)


def _write(flag: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be written: {error.strerror or error}") from error
