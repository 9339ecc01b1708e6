"""DeepSpeed itself, an optional package: imported when a checkpoint of its is read, not before."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from moe_serve.errors import INSTALL_DEEPSPEED, CheckpointError


def deepspeed_module(name: str) -> Any:
    """The module `deepspeed.<name>`. Raises `CheckpointError` with what to install."""
    # It logs to standard output, which may be a command's result.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return importlib.import_module(f"deepspeed.{name}")
        except ImportError as error:
            raise CheckpointError(
                f"reading a DeepSpeed checkpoint needs the package deepspeed ({error}): "
                f"{INSTALL_DEEPSPEED}"
            ) from error
