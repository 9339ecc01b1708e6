"""`moe-serve plan`: replay recorded routing through placements, without weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from moe_serve.errors import ConfigError, RecordingError
from moe_serve.option_parser import OptionParser, closest

if TYPE_CHECKING:
    from moe_serve.experts.analysis.hardware import Hardware
    from moe_serve.experts.analysis.plan import Layout
    from moe_serve.experts.analysis.step_time import TimeModel
    from moe_serve.experts.files.placement_files import Style
    from moe_serve.experts.recording import Ints, RouteRecording

BATCH_TOKENS = 2048
EP_SIZES = "2,4,8"
HARDWARE = "h100-sxm"
# Flags that replace one number of the hardware, by its field.
_OVERRIDES = {
    "flops": "16-bit operations a second of a rank",
    "memory_bandwidth": "bytes a second of its memory",
    "link_bandwidth": "bytes a second one way from a rank to all others",
    "message_seconds": "what an exchange takes however little it moves",
}
_EPILOG = """\
Rows, bytes and memory are exact: what the server's dispatchers would do with these tokens, in
steps of --batch-tokens, each step's tokens in equal runs on the ranks. Times are estimates. Steps
are cut from the requests one after another, as long prompts are; for decoding, --batch-tokens is
the number of requests at once, and a real step has a token of each of them. Placements that are
balanced for the trace itself show the best case; --balance-by takes an earlier recording."""


def run(argv: Sequence[str], *, prog: str) -> int:
    """Print the plan; returns the exit code."""
    options = _parser(prog).parse(argv)
    from moe_serve.experts.analysis.plan import make_plan
    from moe_serve.experts.files.placement_files import write_placement
    from moe_serve.reports.plan_table import plan_table, plan_values

    style, model = _style(options), _model(options)
    routes = _routes(options, model)
    layouts = _layouts(options, routes)
    with _progress(len(layouts) * routes.num_tokens) as on_tokens:
        plan = make_plan(
            routes,
            layouts,
            batch_tokens=_whole("--batch-tokens", options.batch_tokens, least=1),
            model=model,
            on_tokens=on_tokens,
        )
    balanced_for = options.balance_by or "the trace itself"
    if options.json:
        print(json.dumps(plan_values(plan, balanced_for), indent=1))
    else:
        print(plan_table(plan, balanced_for))
    if options.output is not None:
        # Last, so that what took long to find is shown even where it cannot be written.
        layout = plan.best.layout
        write_placement(layout.placement, options.output, style)
        print(
            f"{options.output}: the {layout.source} placement with {layout.num_redundant} "
            "redundant experts",
            file=sys.stderr if options.json else sys.stdout,
        )
    return 0


def _parser(prog: str) -> OptionParser:
    from moe_serve.experts.analysis.expert_shape import ROW_BYTES
    from moe_serve.experts.analysis.hardware import PRESETS
    from moe_serve.experts.files.placement_files import Style

    parser = OptionParser(
        prog=prog,
        usage=f"{prog} --trace FILE [options]",
        description="Replay recorded expert choices through placements, without weights.",
        epilog=_EPILOG,
    )

    def add(group: str, name: str, metavar: str, text: str) -> None:
        parser.add_to_group(group, name, metavar=metavar, help=text)

    parser.add_to_group(
        "routing", "--trace", metavar="FILE", required=True, help="recorded routes (.npz)"
    )
    add("routing", "--batch-tokens", "N", f"tokens in one step, of all ranks [{BATCH_TOKENS}]")
    add("placements", "--ep", "N,N", f"numbers of ranks that hold the experts [{EP_SIZES}]")
    add("placements", "--redundant", "N,N", "numbers of redundant experts, of all ranks [0]")
    add("placements", "--balance-by", "FILE", "balance this recorded load or trace [--trace]")
    add("placements", "--placement", "FILE", "replay this placement too, on --ep ranks")
    add("model and machine", "--config", "FILE", "the model's config.json, or its folder")
    add("model and machine", "--dtype", "DTYPE", f"in place of the config's: {_or(ROW_BYTES)}")
    add("model and machine", "--hardware", "NAME", f"{_or(PRESETS)} [{HARDWARE}]")
    for name, text in _OVERRIDES.items():
        add("model and machine", _flag(name), "X", f"{text} [the hardware's]")
    add("output", "--output", "FILE", "write the best placement, of one --ep")
    styles = f"of that file: {_or(get_args(Style))} [moe_serve]; MoE layers alone are numbered"
    add("output", "--style", "NAME", styles)
    parser.add_to_group("output", "--json", action="store_true", help="all numbers, as JSON")
    return parser


def _model(options: argparse.Namespace) -> TimeModel | None:
    """None without --config; then nothing may be told of the machine either."""
    from moe_serve.experts.analysis.expert_shape import ROW_BYTES, read_shape
    from moe_serve.experts.analysis.step_time import TimeModel

    if options.config is None:
        for name in ("dtype", "hardware", *_OVERRIDES):
            if getattr(options, name) is not None:
                raise ConfigError(f"{_flag(name)} has no effect without --config")
        return None
    if options.dtype not in (None, *ROW_BYTES):
        raise ConfigError(f"--dtype {options.dtype!r} is not one of {', '.join(ROW_BYTES)}")
    shape = read_shape(Path(options.config), options.dtype)
    return TimeModel(shape=shape, hardware=_hardware(options))


def _hardware(options: argparse.Namespace) -> Hardware:
    from moe_serve.experts.analysis.hardware import PRESETS

    name = options.hardware or HARDWARE
    if name not in PRESETS:
        raise ConfigError(f"--hardware {name!r} is not one of {', '.join(PRESETS)}")
    given: dict[str, Any] = {
        field: _positive(_flag(field), getattr(options, field))
        for field in _OVERRIDES
        if getattr(options, field) is not None
    }
    if given:
        given["name"] = f"{name}, changed"
    return dataclasses.replace(PRESETS[name], **given)


def _routes(options: argparse.Namespace, model: TimeModel | None) -> RouteRecording:
    from moe_serve.experts.analysis.plan import check_shape
    from moe_serve.experts.files.route_files import read_routes

    routes = read_routes(options.trace)
    if not routes.num_tokens:
        raise RecordingError(f"{options.trace}: has no tokens")
    if model is not None:
        if routes.num_experts < model.shape.num_experts:
            # A file that does not tell may lack the last experts, which no token chose; of one that
            # does, the check says what differs.
            with suppress(RecordingError):
                routes = read_routes(options.trace, num_experts=model.shape.num_experts)
        check_shape(routes, model.shape)
    return routes


def _style(options: argparse.Namespace) -> Style:
    from moe_serve.experts.files.placement_files import Style

    if options.style is None:
        return "moe_serve"
    if options.output is None:
        raise ConfigError("--style has no effect without --output")
    for style in get_args(Style):
        if style == options.style:
            return cast("Style", style)
    advice = closest(options.style, get_args(Style))
    raise ConfigError(f"--style {options.style} must be {_or(get_args(Style))}{advice}")


def _layouts(options: argparse.Namespace, routes: RouteRecording) -> list[Layout]:
    """The named ones first, then the file's."""
    from moe_serve.experts.analysis.plan import Layout, make_layouts
    from moe_serve.experts.files.placement_files import read_placement

    rank_counts = _whole_numbers("--ep", options.ep or EP_SIZES, least=1)
    redundant = _whole_numbers("--redundant", options.redundant or "0", least=0)
    for flag, file in (("--placement", options.placement), ("--output", options.output)):
        if file is not None and len(rank_counts) > 1:
            raise ConfigError(f"{flag} is for one number of ranks; give one --ep, for example 4")
    most = routes.num_experts + min(redundant)
    if max(rank_counts) > most:
        raise ConfigError(f"--ep {max(rank_counts)}: {most} experts cannot fill as many ranks")
    layouts = make_layouts(_load(options, routes), rank_counts, redundant)
    if options.placement is not None:
        placement = read_placement(
            options.placement,
            rank_counts[0],
            num_layers=routes.num_layers,
            num_experts=routes.num_experts,
        )
        num_redundant = placement.num_slots - routes.num_experts
        layouts.append(Layout(source="file", num_redundant=num_redundant, placement=placement))
    return layouts


def _load(options: argparse.Namespace, routes: RouteRecording) -> Ints:
    """[L, E]: what balanced placements are made for."""
    if options.balance_by is None:
        return routes.counts_LE
    from moe_serve.experts.files.load_files import read_load
    from moe_serve.experts.files.route_files import is_routes, read_routes

    file = options.balance_by
    if is_routes(file):
        counts_LE = read_routes(file, num_experts=routes.num_experts).counts_LE
    else:
        counts_LE = read_load(file, top_k=routes.top_k).counts_LE
    if counts_LE.shape != (routes.num_layers, routes.num_experts):
        raise ConfigError(
            f"--balance-by {options.balance_by}: {counts_LE.shape[0]} layers of "
            f"{counts_LE.shape[1]} experts, but the trace has {routes.num_layers} of "
            f"{routes.num_experts}"
        )
    return counts_LE


def _whole_numbers(flag: str, text: str, least: int) -> list[int]:
    """'2,4,8' -> those numbers, each once, in order of size."""
    return sorted({_whole(flag, part, least) for part in text.split(",")})


def _whole(flag: str, text: str | None, least: int) -> int:
    if text is None:
        return BATCH_TOKENS
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{flag} {text!r} must be a whole number from {least} on")
    return number


def _positive(flag: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{flag} {text!r} must be a number above 0, as 3.35e12")
    return number


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("Replaying", total=total)
        yield lambda num_tokens: bars.advance(task, num_tokens)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _or(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"
