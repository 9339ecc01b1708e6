"""`moe-serve report`: how even expert load is, what that costs, and what rebalancing would give."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_serve.cli.client import ask
from moe_serve.errors import ConfigError, RecordingError
from moe_serve.option_parser import OptionParser, closest
from moe_serve.options import variable

if TYPE_CHECKING:
    from rich.console import Console

    from moe_serve.experts.recording import LoadRecording

PHASES = ("all", "prefill", "decode", "recomputed")
LOAD_PATH = "/v1/moe/load"
COMMUNICATION_PATH = "/v1/moe/communication"
_EPILOG = """\
A FILE is a recorded load (.json or .npz of this server, SGLang's .pt dump, or .json with "counts"),
or recorded routes (.npz). Several are taken together, as windows of one recording; to compare two,
give the earlier one as --baseline. Only files of this server can tell where experts lay; for others
--ranks N shows what their load would be on N ranks. Layers are MoE layers, from 0."""


def run(argv: Sequence[str], *, prog: str) -> int:
    """Print the report, or write it; returns the exit code."""
    options = _parser(prog).parse(argv)
    if options.communication:
        return _communication(options)
    num_ranks, num_redundant = _ranks(options)
    if options.phase not in PHASES:
        advice = closest(options.phase, PHASES)
        raise ConfigError(f"--phase {options.phase} must be one of {', '.join(PHASES)}{advice}")
    from moe_serve.experts.analysis.report import build_report

    top_k = None if options.top_k is None else _whole("--top-k", options.top_k, least=1)
    recording = _recording(options, top_k)
    baseline = _baseline(options, top_k)
    report = build_report(
        recording, baseline=baseline, num_ranks=num_ranks, num_redundant=num_redundant
    )
    if options.html is not None:
        _write_page(report, options.html)
    if options.json:
        print(json.dumps(report, allow_nan=False))
    elif options.html is None:
        _print(report)
    return 0


def _parser(prog: str) -> OptionParser:
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} [--url URL | FILE...] [options]",
        description="Tell how even expert load is, what that costs, and what rebalancing gives.",
        epilog=_EPILOG,
    )

    def add(name: str, metavar: str, text: str) -> None:
        parser.add_to_group("options", name, metavar=metavar, help=text)

    parser.add_to_group("options", "files", metavar="FILE", nargs="*", help="recorded load")
    add("--url", "URL", "ask a running server, as http://localhost:8000")
    add("--api-key", "KEY", f"the server's; default: {variable('api_key')}")
    add("--baseline", "FILE", "load to compare with")
    add("--ranks", "N", "show the load on N ranks, experts in order, in place of its own placement")
    add("--redundant", "N", "redundant experts on those ranks [0]")
    parser.add_to_group(
        "options", "--phase", metavar=f"{{{','.join(PHASES)}}}", default="all",
        help="tokens to count [all]",
    )  # fmt: skip
    add("--top-k", "N", "experts per token, for a file that does not tell")
    parser.add_to_group("options", "--json", action="store_true", help="print the report as JSON")
    add("--html", "OUT", "write the report as one page, for a browser")
    parser.add_to_group(
        "options", "--communication", action="store_true",
        help="with --url: report on what its ranks move between each other instead",
    )  # fmt: skip
    return parser


def _communication(options: argparse.Namespace) -> int:
    given = {
        "a FILE": bool(options.files),
        "--phase": options.phase != "all",
        **{f"--{name.replace('_', '-')}": getattr(options, name) is not None for name in (
            "baseline", "ranks", "redundant", "top_k", "html")},
    }  # fmt: skip
    extra = [name for name, is_given in given.items() if is_given]
    if extra:
        raise ConfigError(f"{extra[0]} has no effect with --communication")
    if options.url is None:
        raise ConfigError("--communication needs --url of a running server")
    api_key = options.api_key or os.environ.get(variable("api_key"))
    report = ask(options.url, COMMUNICATION_PATH, api_key)
    if not isinstance(report, dict) or not {"summary", "ranks", "model"} <= report.keys():
        raise RecordingError(f"{options.url} sends no report on communication")
    if options.json:
        print(json.dumps(report, allow_nan=False))
        return 0
    from moe_serve.reports.communication_terminal import print_communication

    print_communication(report, _console())
    return 0


def _ranks(options: argparse.Namespace) -> tuple[int | None, int]:
    if options.ranks is None:
        if options.redundant is not None:
            raise ConfigError("--redundant has no effect without --ranks")
        return None, 0
    return (
        _whole("--ranks", options.ranks, least=1),
        _whole("--redundant", options.redundant or "0", least=0),
    )


def _whole(flag: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{flag} {text} must be a whole number, {least} or more")
    return number


def _recording(options: argparse.Namespace, top_k: int | None) -> LoadRecording:
    from moe_serve.experts.analysis.selection import join, of_phase

    if bool(options.files) == (options.url is not None):
        raise ConfigError("give either recorded FILEs, or --url of a running server")
    if options.url is None:
        if options.api_key is not None:
            raise ConfigError("--api-key has no effect without --url")
        recording = join([_read(file, top_k) for file in options.files])
    else:
        if top_k is not None:
            raise ConfigError("--top-k has no effect with --url; the server tells it")
        recording = _fetch(options.url, options.api_key or os.environ.get(variable("api_key")))
    return recording if options.phase == "all" else of_phase(recording, options.phase)


def _baseline(options: argparse.Namespace, top_k: int | None) -> LoadRecording | None:
    from moe_serve.experts.analysis.selection import of_phase

    if options.baseline is None:
        return None
    baseline = _read(options.baseline, top_k)
    return baseline if options.phase == "all" else of_phase(baseline, options.phase)


def _read(file: str, top_k: int | None) -> LoadRecording:
    from moe_serve.experts.files.load_files import read_load
    from moe_serve.experts.files.route_files import is_routes, load_of, read_routes

    return load_of(read_routes(file)) if is_routes(file) else read_load(file, top_k=top_k)


def _fetch(url: str, api_key: str | None) -> LoadRecording:
    """The load that a server tells. Raises `EngineError` where it does not answer."""
    from moe_serve.experts.files.load_files import from_json

    values = ask(url, LOAD_PATH, api_key)
    return from_json(values, url.rstrip("/") + LOAD_PATH)


def _write_page(report: dict[str, Any], file: str) -> None:
    from moe_serve.reports.page import render_page

    try:
        Path(file).write_text(render_page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file} cannot be written: {error.strerror or error}") from error
    print(f"{file}: written", file=sys.stderr)


def _print(report: dict[str, Any]) -> None:
    from moe_serve.reports.terminal import print_report

    print_report(report, _console())


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=120)
    return console
