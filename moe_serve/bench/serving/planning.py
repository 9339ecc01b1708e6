"""From flags to a load: reads the files first, so that a mistake shows before a server is asked."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from moe_serve.bench.serving import flags
from moe_serve.bench.serving.arrivals import arrivals
from moe_serve.bench.serving.bodies import Wording
from moe_serve.bench.serving.loads import Given, Load, Replayed, Source, Synthetic
from moe_serve.bench.serving.material import Material, from_tokenizer, ids_below, words
from moe_serve.bench.serving.prompts import Lengths, Prompt, read_prompts
from moe_serve.bench.serving.traces import TraceCut, TraceRow, read_trace
from moe_serve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What files gave: rows of a trace, or prompts, or neither."""

    rows: list[TraceRow] = dataclasses.field(default_factory=list)
    prompts: list[Prompt] = dataclasses.field(default_factory=list)
    num_left_out: int = 0


def read_inputs(options: argparse.Namespace) -> Inputs:
    """Raises `ConfigError` that names the file and the line."""
    if options.prompts is not None:
        output_len = options.output_len or flags.OUTPUT_LEN
        return Inputs(prompts=read_prompts(options.prompts, output_len))
    if options.trace is None:
        return Inputs()
    kept = _cut(options).apply(read_trace(options.trace))
    if not kept.rows:
        raise ConfigError(
            f"{options.trace}: all {kept.num_left_out} requests are longer than --trace-max-len "
            f"{options.trace_max_len}; --trace-scale makes them shorter"
        )
    return Inputs(rows=kept.rows, num_left_out=kept.num_left_out)


def make_load(options: argparse.Namespace, inputs: Inputs, ask_ids: Callable[[], Material]) -> Load:
    """`ask_ids` is called where prompts are made of ids that only a server can tell."""
    wording = Wording(
        endpoint=options.endpoint,
        ignore_eos=not options.no_ignore_eos,
        extra=options.extra_body or {},
    )
    if inputs.rows:
        due = [row.seconds for row in inputs.rows]
        return Load(source=_replayed(options, inputs.rows, ask_ids), due=due, wording=wording)
    num_prompts = options.num_prompts or len(inputs.prompts) or flags.NUM_PROMPTS
    source: Source
    if inputs.prompts:
        source = Given(from_file=inputs.prompts, num_prompts=num_prompts)
    else:
        source = _synthetic(options, num_prompts, ask_ids)
    due = arrivals(
        num_prompts, options.request_rate or float("inf"), options.burstiness or 1.0, options.seed
    )
    return Load(source=source, due=due, wording=wording)


def _cut(options: argparse.Namespace) -> TraceCut:
    return TraceCut(
        speed=options.trace_speed or 1.0,
        scale=options.trace_scale or 1.0,
        max_rows=options.trace_limit,
        max_seconds=options.trace_seconds or float("inf"),
        max_len=options.trace_max_len or float("inf"),
    )


def _replayed(
    options: argparse.Namespace, rows: list[TraceRow], ask_ids: Callable[[], Material]
) -> Replayed:
    return Replayed(
        material=_material(options, ask_ids),
        rows=rows,
        block_tokens=_cut(options).block_tokens,
        seed=options.seed,
        is_text=_is_text(options),
    )


def _synthetic(
    options: argparse.Namespace, num_prompts: int, ask_ids: Callable[[], Material]
) -> Synthetic:
    lengths = Lengths(
        input_len=options.input_len or flags.INPUT_LEN,
        output_len=options.output_len or flags.OUTPUT_LEN,
        range_ratio=options.range_ratio or 0.0,
        shared_prefix_len=options.shared_prefix_len or 0,
    )
    return Synthetic(
        material=_material(options, ask_ids),
        lengths=lengths,
        num_prompts=num_prompts,
        seed=options.seed,
        is_text=_is_text(options),
    )


def _material(options: argparse.Namespace, ask_ids: Callable[[], Material]) -> Material:
    if options.tokenizer is not None:
        return from_tokenizer(options.tokenizer)
    if options.vocab_size is not None:
        return ids_below(options.vocab_size)
    return words() if _is_text(options) else ask_ids()


def _is_text(options: argparse.Namespace) -> bool:
    return bool(options.endpoint == "chat" or options.prompt_tokens == "text")
