"""`moe-serve bench KIND`: measure a server, the engine or its kernels.

A kind is a module with `add_arguments(parser)` and `run(options) -> exit code`, imported only when
it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from moe_serve.errors import ConfigError
from moe_serve.option_parser import OptionParser, closest


class Kind(NamedTuple):
    module: str
    text: str


KINDS = {
    "serve": Kind(
        "moe_serve.bench.serving.command", "a running server under load, ours or another"
    ),
    "throughput": Kind("moe_serve.bench.throughput", "the engine without a server, all at once"),
    "latency": Kind("moe_serve.bench.latency", "one batch through the engine, again and again"),
    "kernels": Kind("moe_serve.bench.kernels.command", "single kernels, beside their limits"),
    "step": Kind("moe_serve.bench.step.command", "where the time of an engine step goes"),
}


def run(argv: Sequence[str], *, prog: str) -> int:
    """Run one kind of benchmark; returns the exit code."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help", "help"):
        print(_overview(prog))
        return 0
    if name not in KINDS:
        raise ConfigError(_unknown(name))
    module = importlib.import_module(KINDS[name].module)
    parser = OptionParser(
        prog=f"{prog} {name}",
        usage=f"{prog} {name} [options]",
        description=f"Measure {KINDS[name].text}.",
        epilog=getattr(module, "EPILOG", ""),
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse(argv[1:])))


def _overview(prog: str) -> str:
    lines = [f"usage: {prog} KIND [options]", "", "kinds:"]
    lines += [f"  {name:<12}{kind.text}" for name, kind in KINDS.items()]
    return "\n".join([*lines, "", f"{prog} KIND --help tells the options of a kind."])


def _unknown(name: str) -> str:
    known = f"kinds: {', '.join(KINDS)}"
    if not name:
        return f"which kind of benchmark? {known}"
    return f"{name!r} is no kind of benchmark{closest(name, KINDS)} ({known})"
