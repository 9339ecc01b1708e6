"""One file of `torch.save`, mapped instead of read, and without running what a pickle may name."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from moe_serve.deepspeed_checkpoint.library import deepspeed_module
from moe_serve.errors import CheckpointError

_GLOBAL = re.compile(r"GLOBAL (\S+)")


def load_file(file: Path) -> dict[str, Any]:
    """The dict in a file; its tensors lie in the mapped file, which is not to change meanwhile.

    Of classes beyond torch's own tensors only those are made that hold DeepSpeed's numbers.
    Raises `CheckpointError` naming the file, and the global that a pickle asks for if refused.
    """
    classes = _allowed_classes()
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(classes):
            warnings.simplefilter("ignore")
            found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    # A damaged file makes the reader raise nearly anything.
    except Exception as error:
        raise CheckpointError(_reason(file, error)) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: must hold a dict, found {type(found).__name__}")
    return found


def _allowed_classes() -> list[Any]:
    """The classes of its own that DeepSpeed 0.19 pickles: data, and nothing runs when made."""
    scalers = deepspeed_module("runtime.fp16.loss_scaler")
    return [
        scalers.LossScaler,
        scalers.DynamicLossScaler,
        deepspeed_module("runtime.zero.config").ZeroStageEnum,
        deepspeed_module("utils.tensor_fragment").fragment_address,
    ]


def _reason(file: Path, error: Exception) -> str:
    text = str(error)
    refused = _GLOBAL.search(text)
    if refused:
        return (
            f"{file}: its pickle asks for {refused[1]}, which is no data: refused, as loading it "
            "could run code; expected are tensors and plain values, as DeepSpeed saves them"
        )
    if "mmap can only be used" in text:
        return f"{file}: not a zip archive as torch.save writes since 1.6 (truncated, or older)"
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return f"{file}: cannot be read as a file of torch.save: truncated or damaged ({first})"
