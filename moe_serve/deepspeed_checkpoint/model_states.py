"""What a `*_model_states.pt` says: the module's tensors, and the names and order of parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_serve.deepspeed_checkpoint.lazy_tensor import Shape
from moe_serve.deepspeed_checkpoint.safe_load import load_file
from moe_serve.errors import CheckpointError

_AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """`groups`: of each parameter group of ZeRO, the shapes by name in the order of its flat
    vector; empty without ZeRO. `shared`: name without data -> the name that has them. `module`:
    all by name, without elements where ZeRO-3 has taken them. `fragments`: of parameters that
    are not trained, this rank's part.
    """

    file: Path
    module: Mapping[str, Tensor]
    buffers: frozenset[str]
    groups: tuple[Mapping[str, Shape], ...]
    shared: Mapping[str, str]
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, Tensor]
    num_experts: tuple[int, ...]
    global_steps: int
    mp_world_size: int


def read_model_states(file: Path) -> ModelStates:
    """Raises `CheckpointError` naming the file and the field."""
    found = load_file(file)
    if any(found.get(key) for key in _AUTOEP_KEYS):
        raise CheckpointError(
            f"{file}: saved by DeepSpeed's AutoEP (its field {_AUTOEP_KEYS[0]} is set), whose "
            "layout of experts is not read; expected ZeRO or deepspeed.moe.layer.MoE"
        )
    groups = [_shapes(file, "param_shapes", group) for group in _list(file, found, "param_shapes")]
    _refuse_twice(file, groups)
    return ModelStates(
        file=file,
        module=checked_tensors(file, "module", found.get("module")),
        buffers=frozenset(_list(file, found, "buffer_names")),
        groups=tuple(groups),
        shared=_dict(file, "shared_params", found.get("shared_params") or {}),
        frozen=_shapes(file, "frozen_param_shapes", found.get("frozen_param_shapes") or {}),
        fragments=checked_tensors(
            file, "frozen_param_fragments", found.get("frozen_param_fragments") or {}
        ),
        num_experts=tuple(_list(file, found, "num_experts")),
        global_steps=_number(file, found, "global_steps"),
        mp_world_size=_number(file, found, "mp_world_size"),
    )


def _refuse_twice(file: Path, groups: Sequence[Mapping[str, Shape]]) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group:
            if name in seen:
                raise CheckpointError(f"{file}: param_shapes names {name} twice; expected once")
            seen.add(name)


def checked_tensors(file: Path, field: str, found: Any) -> Mapping[str, Tensor]:
    """A dict of nothing but tensors. Raises `CheckpointError` naming `file` and `field`."""
    for name, tensor in _dict(file, field, found).items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{file}: {field} holds {type(tensor).__name__} as {name}; expected a dense tensor"
            )
    return {name: tensor.detach() for name, tensor in found.items()}


def _shapes(file: Path, field: str, found: Any) -> Mapping[str, Shape]:
    shapes = {}
    for name, shape in _dict(file, field, found).items():
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else ("?",)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise CheckpointError(f"{file}: {field} gives {name} the shape {shape!r}")
        shapes[name] = sizes
    return shapes


def _dict(file: Path, field: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(
            f"{file}: {field} is {type(found).__name__}; expected a dict by name: not the model "
            "states that DeepSpeed saves"
        )
    return found


def _list(file: Path, found: Mapping[str, Any], field: str) -> list[Any]:
    value = found.get(field)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{file}: {field} is {type(value).__name__}; expected a list")
    return list(value)


def _number(file: Path, found: Mapping[str, Any], field: str) -> int:
    value = found.get(field)
    if not isinstance(value, int):
        raise CheckpointError(f"{file}: {field} is {value!r}; expected a number")
    return value


def num_elements(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
