"""Fill a rank's decoder from a checkpoint: all checks, then memory, then one pass over the files.

A rank reads the parts that it holds and nothing else; what it leaves out is checked all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor, nn

from moe_serve.checkpoint import FLOAT_DTYPES, TensorInfo
from moe_serve.config import DTypeName
from moe_serve.errors import CheckpointError
from moe_serve.file_runs import FileRun, read_runs
from moe_serve.kernels.cpu.memory import prefer_huge_pages
from moe_serve.models.decoder import Decoder
from moe_serve.models.fit import check_deterministic, check_fit
from moe_serve.models.names import CheckpointNames
from moe_serve.models.reading import HFConfig
from moe_serve.models.registry import find_family
from moe_serve.models.shard import WHOLE_MODEL, ModelShard
from moe_serve.models.slots import Shape, Slot, Source
from moe_serve.models.sources import decoder_sources
from moe_serve.models.spec import DecoderSpec
from moe_serve.parallel.shard import Span
from moe_serve.ranks import SINGLE_RANK, Ranks
from moe_serve.tensor_source import TensorSource, open_tensors

# Tensor name -> what this rank takes of it.
Plan = dict[str, Source]

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
    ranks: Ranks = SINGLE_RANK,
    on_progress: Callable[[int, int], None] | None = None,
    finish: Callable[[nn.Module], None] | None = None,
) -> Decoder:
    """This rank's decoder with all weights set, in `dtype` on `device` (routers stay fp32).

    Degrees that do not fit the model raise `ConfigError`, and whatever is wrong with the folder
    `CheckpointError`, before the model's memory is taken. `on_progress(read, total)` is told the
    bytes read so far and all that this rank reads, instead of a bar; the bar shows on a terminal
    only. `finish` is called with each layer once that is filled, and then with the decoder: where
    it makes layers smaller, they are never in memory all as they were read.
    """
    refuse_quantised(hf_config)
    family = find_family(hf_config.architectures)
    spec = family.spec(hf_config)
    check_fit(spec, ranks.layout)
    check_deterministic(ranks.layout, device.type)
    checkpoint = open_tensors(folder)
    plan = make_plan(spec, family.names, checkpoint, ranks.shard)
    check_coverage(plan, parameter_shapes(Decoder(spec, dtype, torch.device("meta"), ranks)))
    decoder = Decoder(spec, dtype, device, ranks)
    for parameter in decoder.parameters():
        prefer_huge_pages(parameter)
    total = num_bytes_to_read(plan, checkpoint)
    with _progress(total, show_bar=show_progress, on_progress=on_progress) as advance:
        if finish is None:
            fill(dict(decoder.named_parameters()), checkpoint, plan, advance)
        else:
            _fill_in_turn(decoder, checkpoint, plan, advance, finish)
    return decoder.eval()


def _fill_in_turn(
    decoder: Decoder,
    checkpoint: TensorSource,
    plan: Plan,
    advance: Callable[[int], None],
    finish: Callable[[nn.Module], None],
) -> None:
    modules = (*decoder.layers, decoder)
    turns = {id(p): turn for turn, layer in enumerate(decoder.layers) for p in layer.parameters()}
    last = len(decoder.layers)
    turn_of = {name: turns.get(id(p), last) for name, p in decoder.named_parameters()}
    parts = _split_plan(plan, turn_of)
    for turn, module in enumerate(modules):
        # Memory of a parameter is taken when it is written: those of later turns have none yet.
        parameters = {
            name: parameter
            for name, parameter in decoder.named_parameters()
            if turn_of[name] == turn
        }
        fill(parameters, checkpoint, parts.get(turn, {}), advance)
        del parameters
        finish(module)


def _split_plan(plan: Plan, turn_of: Mapping[str, int]) -> dict[int, Plan]:
    """What fills the parameters of each turn."""
    parts: dict[int, Plan] = {}
    for name, source in plan.items():
        slots: dict[int, list[Slot]] = {}
        for slot in source.slots:
            slots.setdefault(turn_of[slot.parameter], []).append(slot)
        for turn, own in slots.items():
            parts.setdefault(turn, {})[name] = dataclasses.replace(source, slots=tuple(own))
    return parts


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


def make_plan(
    spec: DecoderSpec,
    names: CheckpointNames,
    checkpoint: TensorSource,
    shard: ModelShard = WHOLE_MODEL,
) -> Plan:
    """What this rank takes of each tensor; all are there, whether it takes from them or not.

    Raises `CheckpointError` for tensors missing, unknown or unfit.
    """
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    plan: Plan = {}
    missing = []
    for source in decoder_sources(spec, names, shapes, shard):
        name = next((name for name in source.names if name in shapes), None)
        if name is None:
            missing.append(source.names[0])
        else:
            plan[name] = source
    _refuse_missing(checkpoint, missing)
    _refuse_unknown(checkpoint, plan, spec)
    for name, source in plan.items():
        _check_tensor(checkpoint, name, source.shape)
    return plan


def parameter_shapes(decoder: Decoder) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def check_coverage(plan: Plan, shapes: Mapping[str, Shape]) -> None:
    """Every row of every parameter (its shape by name) is filled once, in full width."""
    runs: dict[str, list[Span]] = {}
    for source in plan.values():
        for slot in source.slots:
            runs.setdefault(slot.parameter, []).extend(_rows(slot, shapes[slot.parameter]))
    for name, shape in shapes.items():
        row = 0
        for run in sorted(runs.get(name, [])):
            assert run.start == row, f"{name}: rows {row} to {run.start} are unset or set twice"
            row = run.stop
        assert row == math.prod(shape[: max(1, len(shape) - 1)]), f"{name}: unset from row {row} on"


def num_bytes_to_read(plan: Plan, checkpoint: TensorSource) -> int:
    return sum(
        slot.num_elements * checkpoint.tensors[name].itemsize
        for name, source in plan.items()
        for slot in source.slots
    )


def fill(
    parameters: Mapping[str, Tensor],
    checkpoint: TensorSource,
    plan: Plan,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Copy each planned part into its place, converting the dtype on the way.

    Parts that lie in the file as they do in memory are read there, by all threads of torch's.
    """
    runs: list[FileRun] = []
    others: dict[str, list[Slot]] = {}
    for name, source in plan.items():
        for slot in source.slots:
            run = _as_run(checkpoint.tensors[name], slot, _target(slot, parameters))
            if run is None:
                others.setdefault(name, []).append(slot)
            else:
                runs.append(run)
    for num_bytes in read_runs(runs, torch.get_num_threads()):
        advance(num_bytes)
    parts = {name: [slot.part for slot in slots] for name, slots in others.items()}
    for name, index, part in checkpoint.read(parts):
        slot = others[name][index]
        _target(slot, parameters).copy_(part.mT if slot.is_transposed else part)
        advance(part.nbytes)
        # Before the next one is put together.
        del part


def _target(slot: Slot, parameters: Mapping[str, Tensor]) -> Tensor:
    target = parameters[slot.parameter]
    for dim, span in enumerate(slot.place):
        target = target.narrow(dim, span.start, span.size)
    return target.view(slot.shape)


def _as_run(info: TensorInfo, slot: Slot, target: Tensor) -> FileRun | None:
    """None where a plain copy of bytes does not do."""
    start = info.run_start(slot.part)
    is_same = target.is_cpu and target.is_contiguous() and target.dtype is FLOAT_DTYPES[info.dtype]
    if start is None or not is_same or slot.is_transposed or not target.numel():
        return None
    return FileRun(info.file, start, target)


def _rows(slot: Slot, shape: Shape) -> list[Span]:
    """Rows that a slot fills, of the parameter as a matrix: all its dimensions but the last are one
    (a vector is a matrix with one column).
    """
    filled = (*(span.size for span in slot.place), *shape[len(slot.place) :])
    # One expert's matrix may come without the dimension of experts.
    assert filled in (slot.shape, (1, *slot.shape)), f"{slot} does not fill {slot.parameter}"
    if len(slot.place) == 1:
        return list(slot.place)
    experts, rows = slot.place
    assert rows.stop <= shape[1], f"{slot} reaches beyond its experts"
    firsts = [expert * shape[1] for expert in range(*experts)]
    return [Span(first + rows.start, first + rows.stop) for first in firsts]


def _refuse_missing(checkpoint: TensorSource, missing: Sequence[str]) -> None:
    if not missing:
        return
    hint = ""
    if "lm_head.weight" in missing:
        hint = " (config.json says tie_word_embeddings false, so lm_head.weight must be there)"
    raise CheckpointError(
        f"{checkpoint.folder}: the checkpoint lacks {len(missing)} of the model's tensors: "
        f"{_listed(missing)}{hint}"
    )


def _refuse_unknown(checkpoint: TensorSource, plan: Plan, spec: DecoderSpec) -> None:
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


def _check_tensor(checkpoint: TensorSource, name: str, shape: Shape) -> None:
    info = checkpoint.tensors[name]
    if info.shape != shape:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name} must have shape {list(shape)} by "
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
def _progress(
    total: int, *, show_bar: bool, on_progress: Callable[[int, int], None] | None
) -> Iterator[Callable[[int], None]]:
    """What to call with each part's bytes: it moves a bar on stderr, or tells `on_progress`."""
    console = Console(stderr=True)
    columns: tuple[Any, ...] = (
        TextColumn("Loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    is_off = on_progress is not None or not (show_bar and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_off) as bar:
        task = bar.add_task("", total=total)

        def advance(num_bytes: int) -> None:
            bar.advance(task, num_bytes)
            if on_progress is not None:
                on_progress(int(bar.tasks[task].completed), total)

        advance(0)
        yield advance
