"""Loading weights against plain reads of the same files, all from the page cache."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from moe_serve import loader
from moe_serve.checkpoint import Checkpoint
from moe_serve.model_folder import open_model_folder
from moe_serve.models.decoder import Decoder
from moe_serve.models.registry import find_family

PIECE = 2**26


def read_files(files: list[Path], memory: memoryview) -> None:
    start = 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(memory[start : start + PIECE]):
                start += num_read


def report(options: argparse.Namespace) -> list[str]:
    folder = open_model_folder(options.model)
    checkpoint = Checkpoint.open(folder.path)
    files = sorted({info.file for info in checkpoint.tensors.values()})
    size = sum(file.stat().st_size for file in files)
    with safe_open(files[0], framework="pt") as shard:
        dtype = shard.get_tensor(next(iter(shard.keys()))).dtype
    family = find_family(folder.hf_config.architectures)
    plan = loader.make_plan(folder.spec, family.names, checkpoint)
    used = torch.zeros(size, dtype=torch.uint8)

    def plain_used() -> None:
        read_files(files, memoryview(used.numpy()))

    def plain_new() -> None:
        read_files(files, memoryview(torch.empty(size, dtype=torch.uint8).numpy()))

    def fill() -> None:
        decoder = Decoder(folder.spec, dtype, torch.device("cpu"))
        loader.fill(dict(decoder.named_parameters()), checkpoint, plan)

    ways = {"plain, into used memory": plain_used, "plain, into new memory": plain_new,
            "our loader": fill}  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in ways}
    plain_used()
    for _ in range(options.tries):
        for name, way in ways.items():
            found[name].append(size / seconds(way) / 1e9)
    lines = [f"| {size / 1e9:.2f} GB, {torch.get_num_threads()} threads | GB/s (median) | all |"]
    lines.append("|---|---|---|")
    for name, speeds in found.items():
        shown = " ".join(f"{speed:.2f}" for speed in speeds)
        lines.append(f"| {name} | {statistics.median(speeds):.2f} | {shown} |")
    return lines


def seconds(way: Callable[[], None]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started
