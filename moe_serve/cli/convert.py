"""`moe-serve convert DIR OUT`: write a checkpoint anew, as safetensors in Hugging Face's layout."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast, get_args

from moe_serve import logs
from moe_serve.config import DTypeName, parse_bytes
from moe_serve.errors import ConfigError
from moe_serve.option_parser import OptionParser, closest

if TYPE_CHECKING:
    from moe_serve.convert.conversion import Conversion
    from moe_serve.tensor_source import TensorSource

MAX_SHARD_SIZE = "5GB"
_EPILOG = """\
DIR is a folder with config.json and the weights: as DeepSpeed saves them (ZeRO 1, 2, 3, MoE), or as
*.safetensors; where it has both, DeepSpeed's are taken. OUT is a folder to be made: weights with an
expert's matrices one by one, as the hub's checkpoints have them, config, tokenizer, chat template,
and SHA256SUMS, for `sha256sum -c`. Everything is checked before anything is written; one tensor at
a time is in memory; OUT appears whole, at the end, or not at all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """What to convert, to what. `tag`: DeepSpeed's name of a step, None for its latest."""

    folder: str
    out: str
    dtype: DTypeName
    max_shard_bytes: int
    tag: str | None


def run(argv: Sequence[str], *, prog: str) -> int:
    """Print the account of what was written; returns the exit code."""
    config = _config(_parser(prog).parse(argv))
    logs.set_up("warning", role="convert")
    from moe_serve.convert.new_folder import check_new_folder
    from moe_serve.model_path import resolve_model

    folder = resolve_model(config.folder)
    out = check_new_folder(config.out, folder)
    from moe_serve.convert.conversion import prepare
    from moe_serve.model_folder import open_model_folder

    with _ended_by_signals():
        model = open_model_folder(str(folder))
        source = _open_source(folder, config.tag)
        conversion = prepare(model, source, out, config.dtype, config.max_shard_bytes)
        with _progress(conversion.tensor_bytes) as advance:
            conversion.write(advance)
    _print_account(conversion)
    return 0


def _parser(prog: str) -> OptionParser:
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} DIR OUT [options]",
        description="Write a checkpoint anew, as safetensors in Hugging Face's layout.",
        epilog=_EPILOG,
    )

    def add(name: str, metavar: str, default: str | None, text: str) -> None:
        parser.add_to_group("options", name, metavar=metavar, default=default, help=text)

    parser.add_to_group("options", "folder", metavar="DIR", help="the checkpoint, or a hub id")
    parser.add_to_group("options", "out", metavar="OUT", help="a folder to be made")
    dtypes = f"{{{','.join(get_args(DTypeName))}}}"
    add("--dtype", dtypes, "auto", "of the weights; auto takes what config.json says [auto]")
    size = f"most bytes of tensors in a file, as 512MiB [{MAX_SHARD_SIZE}]"
    add("--max-shard-size", "SIZE", MAX_SHARD_SIZE, size)
    add("--tag", "TAG", None, "another step of DeepSpeed's than its latest, as global_step10")
    return parser


def _config(options: argparse.Namespace) -> ConvertConfig:
    return ConvertConfig(
        folder=options.folder,
        out=options.out,
        dtype=_dtype(options.dtype),
        max_shard_bytes=_max_shard_bytes(options.max_shard_size),
        tag=options.tag,
    )


def _dtype(text: str) -> DTypeName:
    names = get_args(DTypeName)
    if text in names:
        return cast(DTypeName, text)
    raise ConfigError(f"--dtype {text!r} must be one of {', '.join(names)}{closest(text, names)}")


def _max_shard_bytes(text: str) -> int:
    size = parse_bytes("max_shard_size", text)
    if size < 1:
        raise ConfigError(f"--max-shard-size {text!r} must be at least 1 byte")
    return size


def _open_source(folder: Path, tag: str | None) -> TensorSource:
    """DeepSpeed's files before safetensors: they hold what the optimizer does, in full."""
    from moe_serve.deepspeed_checkpoint.source import open_deepspeed
    from moe_serve.deepspeed_checkpoint.step_files import is_deepspeed
    from moe_serve.tensor_source import open_tensors

    if tag is not None or is_deepspeed(folder):
        return open_deepspeed(folder, tag=tag, show_progress=True)
    return open_tensors(folder)


def _print_account(conversion: Conversion) -> None:
    """What went where; that none is missing or left over was checked before."""
    for shard in conversion.shards:
        print(f"{shard.name}: {_count(len(shard.places), 'tensor')}, {shard.tensor_bytes:,} bytes")
    if conversion.left_out:
        print(f"not needed and left out: {', '.join(conversion.left_out)}")
    print(
        f"{conversion.out}: {_count(len(conversion.outputs), 'tensor')}, "
        f"{conversion.tensor_bytes:,} bytes in {conversion.dtype}, "
        f"{_count(len(conversion.shards), 'shard')}; none missing, none left over"
    )
    if "tokenizer.json" not in conversion.side_files:
        print(f"{conversion.model.path} has no tokenizer.json: text needs one in OUT",
              file=sys.stderr)  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("Writing weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task("", total=total)
        yield lambda num_bytes: bars.advance(task, num_bytes)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal to end unwinds, so that what is half written goes; a second one does not disturb."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {one: signal.getsignal(one) for one in signals}
    # What was ignored stays so, as nohup wants it.
    taken = [one for one in signals if before[one] is not signal.SIG_IGN]
    try:
        for one in taken:
            signal.signal(one, end)
        yield
    finally:
        for one in taken:
            signal.signal(one, before[one])
