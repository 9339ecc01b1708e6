"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_serve.errors import ConfigError

# For names, indices and what the file system keeps of its own.
_SPARE_BYTES = 2**20


def check_new_folder(text: str, source: Path) -> Path:
    """The absolute path of a folder that can be made, beside its source or elsewhere.

    Raises `ConfigError`: it is the source or inside it, it holds files, its parent is not there.
    """
    out = Path(text).expanduser().resolve()
    home = source.resolve()
    if out == home:
        raise ConfigError(f"OUT {text} is the folder to be converted; give another one")
    if out.is_relative_to(home):
        raise ConfigError(f"OUT {text} lies inside {source}; give a folder outside of it")
    if os.path.ismount(out):
        raise ConfigError(f"OUT {text} is a mount point; give a folder in it, to be made")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT {text} is a file; give a folder to be made")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"OUT {text} is not empty; give a folder to be made, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"OUT {text}: there is no folder {out.parent}; make it first")
    return out


@contextlib.contextmanager
def new_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """A folder beside `out`, to be filled; it becomes `out` at the end, or goes on any exception.

    Raises `ConfigError` where it cannot be made or `num_bytes` do not fit on its disk.
    """
    # Random, for the process numbers of containers are alike.
    partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    _check_space(out, num_bytes + _SPARE_BYTES)
    try:
        with writing(partial):
            partial.mkdir()
        yield partial
        with writing(out):
            sync_folder(partial)
            # Takes the place of an empty folder, and of nothing else.
            partial.rename(out)
            sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses becomes one clear `ConfigError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: cannot be written: {reason}") from error


def sync_folder(folder: Path) -> None:
    """Its list of names reaches the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(out: Path, num_bytes: int) -> None:
    available = shutil.disk_usage(out.parent).free
    if num_bytes > available:
        raise ConfigError(
            f"OUT {out} needs {num_bytes} bytes, its disk has {available} left; free some, or "
            "give a folder elsewhere"
        )
