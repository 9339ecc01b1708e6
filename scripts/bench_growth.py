#!/usr/bin/env python3
"""How speed grows with requests at once, prompt length and number of experts, beside the limit.

    scripts/bench_growth.py [--model FOLDER] [--plot growth.svg] [--json growth.json] [--runs 3]

On the CPU, without a server. Without --model, `random_checkpoint.py` makes one of 1.7 billion
parameters. The limit is what the machine, measured first, could do at best: the bytes of the
weights that a step needs over its memory bandwidth, or the step's multiplications over its matrix
rate, whichever takes longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import random_checkpoint

from moe_serve import LLM
from moe_serve.bench import throughput
from moe_serve.bench.limits import Limits, limits_table
from moe_serve.bench.plots import Chart, Series, svg
from moe_serve.bench.table import Table

CONCURRENCY = [1, 2, 4, 8, 16, 32, 64]
LENGTHS = [128, 512, 2048, 4096, 8064]
EXPERTS = [8, 16, 32, 64, 128, 256]
PROMPT, OUTPUT = 128, 32
BATCH = 16


class Shape(NamedTuple):
    """Of a checkpoint with nothing but MoE layers."""

    layers: int
    hidden: int
    experts: int
    top_k: int
    inner: int
    q_size: int
    kv_size: int
    vocab: int

    @classmethod
    def read(cls, folder: Path) -> Shape:
        fields = json.loads((folder / "config.json").read_text())
        head = fields["head_dim"]
        # As one transformers or the other writes it.
        experts = fields.get("num_experts") or fields["num_local_experts"]
        return cls(
            fields["num_hidden_layers"], fields["hidden_size"], experts,
            fields["num_experts_per_tok"], fields["moe_intermediate_size"],
            fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head,
            fields["vocab_size"],
        )  # fmt: skip

    @property
    def attention(self) -> int:
        """Weights of a layer."""
        return self.hidden * (2 * self.q_size + 2 * self.kv_size)

    @property
    def expert(self) -> int:
        return 3 * self.hidden * self.inner

    def seconds(self, limits: Limits, tokens: int, rows: int, context: float) -> float:
        """Of a step at best: `tokens`, of which `rows` get logits, each with `context` keys."""
        # Uniform routing.
        active = self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)
        read = self.layers * (self.attention + active * self.expert) + self.hidden * self.vocab
        keys = self.layers * 2 * self.kv_size * context * rows
        work = self.layers * (self.attention + self.top_k * self.expert + 2 * self.q_size * context)
        multiplied = tokens * work + rows * self.hidden * self.vocab
        return max(2 * (read + keys) / limits.read, 2 * multiplied / limits.bfloat16)

    def request_seconds(self, limits: Limits, count: int, prompt: int, output: int) -> float:
        """Of `count` requests at once."""
        prefill = self.seconds(limits, count * prompt, count, prompt / 2)
        decode = self.seconds(limits, count, count, prompt + output / 2)
        return prefill + (output - 1) * decode


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, measured, limit), in tokens a second."""

    title: str
    x_label: str
    points: list[tuple[int, float, float]]

    def chart(self) -> Chart:
        ours = [(float(x), y) for x, y, _ in self.points]
        limit = [(float(x), y) for x, _, y in self.points]
        series = [Series("measured", ours), Series("limit", limit, style="limit")]
        return Chart(title=self.title, x_label=self.x_label, y_label="tokens/s", log_x=True,
                     log_y=True, series=series)  # fmt: skip

    def table(self) -> Table:
        table = Table([self.x_label, f"{self.title}, tokens/s", "limit", "share"])
        for x, found, limit in self.points:
            table.add(x, f"{found:.1f}", f"{limit:.1f}", f"{found / limit:.0%}")
        return table


def measured(llm: LLM, count: int, prompt: int, output: int, runs: int) -> float:
    """Median seconds of `count` requests at once."""
    found = throughput.measure(
        llm, num_prompts=count, input_len=prompt, output_len=output, num_runs=runs, num_warm_up=1
    )
    return statistics.median(run.seconds for run in found)


def open_model(folder: Path) -> LLM:
    return LLM(str(folder), dtype="bfloat16", enable_prefix_caching=False, kv_cache_memory="1GiB")


def curves_of_model(folder: Path, limits: Limits, args: argparse.Namespace) -> list[Curve]:
    shape, (runs, part) = Shape.read(folder), (1, 3) if args.quick else (args.runs, None)
    at_once, by_length = [], []
    with open_model(folder) as llm:
        for count in CONCURRENCY[:part]:
            tokens = count * OUTPUT
            found = tokens / measured(llm, count, PROMPT, OUTPUT, runs)
            best = tokens / shape.request_seconds(limits, count, PROMPT, OUTPUT)
            at_once.append((count, found, best))
        for length in LENGTHS[:part]:
            found = length / measured(llm, 1, length, 1, runs)
            by_length.append((length, found, length / shape.request_seconds(limits, 1, length, 1)))
    return [
        Curve("Output", "requests at once", at_once),
        Curve("Prompt", "prompt tokens", by_length),
    ]


def curve_of_experts(limits: Limits, args: argparse.Namespace) -> Curve:
    """Four layers, so that the largest fits into memory."""
    points = []
    for experts in EXPERTS[: 2 if args.quick else None]:
        with tempfile.TemporaryDirectory() as name:
            random_checkpoint.main([name, "--layers", "4", "--experts", str(experts)])
            shape = Shape.read(Path(name))
            with open_model(Path(name)) as llm:
                runs = 1 if args.quick else args.runs
                seconds = measured(llm, BATCH, PROMPT, OUTPUT, runs)
        best = shape.request_seconds(limits, BATCH, PROMPT, OUTPUT)
        points.append((experts, BATCH * OUTPUT / seconds, BATCH * OUTPUT / best))
    return Curve(f"Output of {BATCH} requests, 4 layers", "experts", points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=3, help="of each point, after a warm-up")
    parser.add_argument("--quick", action="store_true", help="few points, one run each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.model
        if folder is None:
            folder = Path(name)
            random_checkpoint.main([name, *(["--layers", "2"] if args.quick else [])])
        # The kernels that a model activates are a part of what the machine can do.
        with LLM("builtin", dtype="bfloat16"):
            before = Limits.measure()
            curves = curves_of_model(folder, before, args)
    curves.append(curve_of_experts(before, args))
    print(limits_table(before, Limits.measure()))
    for curve in curves:
        print(f"\n{curve.table()}")
    if args.plot:
        args.plot.write_text(svg([curve.chart() for curve in curves]))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(curve) for curve in curves], indent=1))


if __name__ == "__main__":
    main()
