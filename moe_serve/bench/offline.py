"""What the benchmarks of the engine without a server share: prompts, flags, files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_serve import __version__
from moe_serve.bench.engine_options import add_engine_arguments
from moe_serve.bench.processor import processor_name
from moe_serve.config import EngineConfig, flag
from moe_serve.errors import ConfigError
from moe_serve.messages import EngineReady


def add_arguments(parser: argparse.ArgumentParser, numbers: dict[str, tuple[int, str]]) -> None:
    """`numbers`: flags of whole numbers, name -> (default, help); then what all have in common."""
    for name, (default, text) in numbers.items():
        parser.add_argument(
            flag(name), type=int, default=default, metavar="N", help=f"{text} [{default}]"
        )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts made of random tokens [0]"
    )
    parser.add_argument("--output-json", metavar="FILE", help="also write the results there")
    add_engine_arguments(parser)


def check_at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value < least:
            raise ConfigError(f"{flag(name)} {value} must be at least {least}")


def check_fits(info: EngineReady, input_len: int, output_len: int) -> None:
    """Raises `ConfigError` where the context does not hold prompt and output."""
    if input_len + output_len > info.max_model_len:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len} are more than the context of "
            f"{info.max_model_len} tokens"
        )


def random_prompts(
    rng: np.random.Generator, count: int, length: int, vocab_size: int
) -> list[list[int]]:
    """Lists of token ids; two calls share no prefix worth the name."""
    prompts: list[list[int]] = rng.integers(0, vocab_size, (count, length)).tolist()
    return prompts


def read_prompts(path: str) -> list[str]:
    """One a line: JSON objects with a key "prompt" where the file is called .jsonl, else text.

    Raises `ConfigError` naming the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            is_json = file.suffix == ".jsonl"
            prompts.append(_prompt_of(line, f"{path}:{number}") if is_json else line)
    if not prompts:
        raise ConfigError(f"--dataset-path {path}: there is no prompt in it")
    return prompts


def _prompt_of(line: str, place: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f'{place}: must be an object with a text "prompt"')
    return prompt


def about(config: EngineConfig, info: EngineReady) -> dict[str, Any]:
    """What was measured on what, for the file of results."""
    return about_machine() | {
        "config": config.engine_options(),
        "engine": dataclasses.asdict(info),
    }


def about_machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "moe_serve": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor_name(),
        "num_threads": torch.get_num_threads(),
    }


def headline(config: EngineConfig, info: EngineReady) -> str:
    """One line of what is measured on what."""
    return (
        f"{Path(config.model).name}, {info.num_parameters / 1e6:.1f} M parameters "
        f"({info.num_active_parameters / 1e6:.1f} M active), {info.dtype}, {info.device}, "
        f"{info.num_threads} threads, {info.num_ranks} rank{'s' * (info.num_ranks > 1)}"
    )


def write_json(path: str | None, results: dict[str, Any]) -> None:
    """`path` None: nowhere. Raises `ConfigError` where it cannot be written."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--output-json {path}: cannot be written: {error}") from error


def percentiles(samples: Sequence[float], ranks: Sequence[int]) -> dict[str, float]:
    """{"p50": ...}, linear between samples."""
    values = np.percentile(np.asarray(samples), ranks)
    return {f"p{rank}": float(value) for rank, value in zip(ranks, values, strict=True)}
