"""Fill a decoder from a checkpoint: all checks first, then memory, then one pass over the files."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from moe_serve.checkpoint import FLOAT_DTYPES, Checkpoint
from moe_serve.config import DTypeName
from moe_serve.errors import CheckpointError
from moe_serve.models.decoder import Decoder
from moe_serve.models.names import CheckpointNames
from moe_serve.models.reading import HFConfig
from moe_serve.models.registry import find_family
from moe_serve.models.slots import Slot, decoder_slots
from moe_serve.models.spec import DecoderSpec

# Tensor name -> the slot that it fills.
Plan = dict[str, Slot]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Buffers that older exports wrote; they follow from the config.
_HARMLESS = re.compile(r".*rotary_emb\.inv_freq")
_MOST_NAMES_IN_AN_ERROR = 5


def load_model(
    folder: Path,
    hf_config: HFConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool,
) -> Decoder:
    """A decoder with all weights set, in `dtype` on `device` (routers stay fp32).

    Whatever is wrong with the folder raises `CheckpointError` before the model's memory is taken.
    The bar shows on a terminal only.
    """
    refuse_quantised(hf_config)
    family = find_family(hf_config.architectures)
    spec = family.spec(hf_config)
    checkpoint = Checkpoint.open(folder)
    plan = make_plan(spec, family.names, checkpoint)
    check_coverage(plan, Decoder(spec, dtype, torch.device("meta")))
    decoder = Decoder(spec, dtype, device)
    total = sum(checkpoint.tensors[name].num_bytes for name in plan)
    with _progress(total, is_shown=show_progress) as advance:
        fill(decoder, checkpoint, plan, advance)
    return decoder.eval()


def pick_dtype(hf_config: HFConfig, name: DTypeName, device: torch.device) -> torch.dtype:
    """What to compute in.

    "auto": float16 stays; all else becomes bfloat16, or float16 on a GPU that lacks bfloat16.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    wanted = str(getattr(hf_config, "dtype", None)).removeprefix("torch.")
    return torch.float16 if wanted == "float16" else torch.bfloat16


def refuse_quantised(hf_config: HFConfig) -> None:
    config = getattr(hf_config, "quantization_config", None)
    if config is None:
        return
    fields = config if isinstance(config, dict) else vars(config)
    raise CheckpointError(
        f"config.json: quantization_config (quant_method {fields.get('quant_method')!r}): "
        "quantised checkpoints cannot be served; use one in bfloat16, float16 or float32"
    )


def make_plan(spec: DecoderSpec, names: CheckpointNames, checkpoint: Checkpoint) -> Plan:
    """Give each slot its tensor. Raises `CheckpointError` for tensors missing, unknown or unfit."""
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    plan: Plan = {}
    missing = []
    for slot in decoder_slots(spec, names, shapes):
        name = next((name for name in slot.names if name in shapes), None)
        if name is None:
            missing.append(slot.names[0])
        else:
            plan[name] = slot
    _refuse_missing(checkpoint, missing)
    _refuse_unknown(checkpoint, plan, spec)
    for name, slot in plan.items():
        _check_tensor(checkpoint, name, slot)
    return plan


def check_coverage(plan: Plan, decoder: Decoder) -> None:
    """Every row of every parameter belongs to exactly one slot: none stays unset."""
    runs: dict[str, list[tuple[int, int]]] = {}
    parameters = dict(decoder.named_parameters())
    for slot in plan.values():
        num_rows = math.prod(slot.shape) // _as_rows(parameters[slot.parameter]).shape[1]
        runs.setdefault(slot.parameter, []).append((slot.first_row, num_rows))
    for name, parameter in parameters.items():
        row = 0
        for first_row, num_rows in sorted(runs.get(name, [])):
            assert first_row == row, f"{name}: rows {row} to {first_row} are unset or set twice"
            row += num_rows
        assert row == len(_as_rows(parameter)), f"{name}: rows from {row} on stay unset"


def fill(
    decoder: Decoder,
    checkpoint: Checkpoint,
    plan: Plan,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Copy each planned tensor into its rows, converting the dtype on the way."""
    parameters = dict(decoder.named_parameters())
    for name, tensor in checkpoint.read(plan):
        slot = plan[name]
        source = tensor.mT if slot.is_transposed else tensor
        rows = _as_rows(parameters[slot.parameter].data)
        num_rows = source.numel() // rows.shape[1]
        rows[slot.first_row : slot.first_row + num_rows].view(source.shape).copy_(source)
        advance(checkpoint.tensors[name].num_bytes)


def _as_rows(parameter: Tensor) -> Tensor:
    return parameter[:, None] if parameter.dim() == 1 else parameter.flatten(0, -2)


def _refuse_missing(checkpoint: Checkpoint, missing: Sequence[str]) -> None:
    if not missing:
        return
    hint = ""
    if "lm_head.weight" in missing:
        hint = " (config.json says tie_word_embeddings false, so lm_head.weight must be there)"
    raise CheckpointError(
        f"{checkpoint.folder}: the checkpoint lacks {len(missing)} of the model's tensors: "
        f"{_listed(missing)}{hint}"
    )


def _refuse_unknown(checkpoint: Checkpoint, plan: Plan, spec: DecoderSpec) -> None:
    allowed = {"lm_head.weight"} if spec.tie_embeddings else set()
    unknown = [
        name
        for name in checkpoint.tensors
        if name not in plan and name not in allowed and not _HARMLESS.fullmatch(name)
    ]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder}: the checkpoint has {len(unknown)} tensors that "
            f"{spec.architecture} has no place for: {_listed(sorted(unknown))}"
        )


def _check_tensor(checkpoint: Checkpoint, name: str, slot: Slot) -> None:
    info = checkpoint.tensors[name]
    if info.shape != slot.shape:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name} must have shape {list(slot.shape)} by "
            f"config.json, found {list(info.shape)} in {info.file.name}"
        )
    if info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name} has dtype {info.dtype}; only "
            f"{', '.join(FLOAT_DTYPES)} can be served (quantised weights cannot)"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES_IN_AN_ERROR])
    more = len(names) - _MOST_NAMES_IN_AN_ERROR
    return f"{shown} and {more} more" if more > 0 else shown


@contextlib.contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes on stderr, gone when done -> what to call with each tensor's bytes."""
    console = Console(stderr=True)
    columns: tuple[Any, ...] = (
        TextColumn("Loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    is_shown = is_shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
