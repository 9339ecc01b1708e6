"""The whole tensors of one model-parallel rank, from what its data-parallel ranks have saved.

Where ZeRO has fp32 master weights in the files of the optimizer, these are the tensors:

    ZeRO-1, ZeRO-2   each parameter group is one vector, its parameters one after the other (with
                     paddings that the file tells), cut into a piece a rank
    ZeRO-3           each parameter is padded and cut into a piece a rank; of a rank, the pieces lie
                     one after the other

A parameter that is not trained has no master: it is what its fragments say, or the module's own
tensor. Without files of an optimizer all tensors are the module's, in the dtype of the training.
Source of the layout: DeepSpeed 0.19, `utils/zero_to_fp32.py`, and `runtime/zero/stage_1_and_2.py`
and `stage3.py` for what those files hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from moe_serve.deepspeed_checkpoint.lazy_tensor import (
    FlatTensor,
    FlatVector,
    LazyTensor,
    Shape,
    StoredTensor,
)
from moe_serve.deepspeed_checkpoint.model_states import ModelStates, num_elements
from moe_serve.deepspeed_checkpoint.optimizer_states import (
    OptimizerStates,
    read_optimizer_states,
)
from moe_serve.deepspeed_checkpoint.step_files import ModelParallelFiles
from moe_serve.errors import CheckpointError

# In the name of what an expert's own files hold.
EXPERT_MARK = ".deepspeed_moe.experts."


def merge_ranks(files: ModelParallelFiles, models: Sequence[ModelStates]) -> dict[str, LazyTensor]:
    """All tensors but those of experts with files of their own, each once.

    `models`: what is read of `files.models`. Raises `CheckpointError` for what does not add up.
    """
    first = models[0]
    tensors: dict[str, LazyTensor] = {}
    if files.is_parted and files.optimizers and len(models) != len(files.optimizers):
        raise CheckpointError(
            f"{first.file.parent}: has {len(models)} model files and {len(files.optimizers)} optim "
            f"files of mp_rank_{files.rank:02d}; ZeRO-3 saves one of each a rank"
        )
    if files.optimizers:
        optimizers = read_optimizer_states(files.optimizers)
        if (optimizers[0].stage == 3) is not files.is_parted:
            raise CheckpointError(
                f"{optimizers[0].file}: of ZeRO-{optimizers[0].stage}, which does not fit "
                f"{first.file.name}; expected files of one training"
            )
        tensors |= dict(_zip(models, optimizers)) if files.is_parted else _cut(first, optimizers)
    elif files.is_parted:
        raise CheckpointError(
            f"{first.file}: of ZeRO-3, whose weights are in the files *_optim_states.pt: none there"
        )
    _add_rest(models, tensors, is_parted=files.is_parted)
    return tensors


def _cut(model: ModelStates, ranks: Sequence[OptimizerStates]) -> dict[str, LazyTensor]:
    """The masters of ZeRO-1 and ZeRO-2."""
    _check_num_groups(model, ranks[0], len(ranks[0].groups))
    tensors: dict[str, LazyTensor] = {}
    for index, shapes in enumerate(model.groups):
        if shapes and not _is_of_experts(model, shapes):
            tensors |= dict(_cut_group(model, index, ranks))
    return tensors


def _check_num_groups(model: ModelStates, rank: OptimizerStates, num_groups: int) -> None:
    if len(model.groups) != num_groups:
        raise CheckpointError(
            f"{model.file}: param_shapes has {len(model.groups)} parameter groups, "
            f"{rank.file.name} has {num_groups}; expected as many"
        )


def _is_of_experts(model: ModelStates, shapes: Mapping[str, Shape]) -> bool:
    """Such a group names the experts of the first rank alone; all are in files of their own."""
    of_experts = [name for name in shapes if EXPERT_MARK in name]
    if of_experts and len(of_experts) != len(shapes):
        other = next(name for name in shapes if EXPERT_MARK not in name)
        raise CheckpointError(
            f"{model.file}: param_shapes has {of_experts[0]} and {other} in one parameter group; "
            "expected experts in groups of their own"
        )
    return bool(of_experts)


def _cut_group(
    model: ModelStates, index: int, ranks: Sequence[OptimizerStates]
) -> Iterator[tuple[str, LazyTensor]]:
    shapes, first = model.groups[index], ranks[0]
    paddings = first.paddings[index] if first.paddings is not None else (0,) * len(shapes)
    if len(paddings) != len(shapes):
        raise CheckpointError(
            f"{first.file}: param_alignment_paddings[{index}] has {len(paddings)} entries, "
            f"param_shapes names {len(shapes)} parameters; expected as many"
        )
    vector = FlatVector([rank.groups[index] for rank in ranks])
    needed = num_elements(shapes) + sum(paddings)
    # What fills up the ranks' vectors is cut off by some of DeepSpeed's optimizers, not by all.
    filling = sum(rank.rank_paddings[index] for rank in ranks if rank.rank_paddings is not None)
    if len(vector) not in (needed, needed + filling):
        raise CheckpointError(
            f"{first.file.parent}: the {len(ranks)} optim files hold {len(vector)} elements of "
            f"parameter group {index}, its parameters by {model.file.name} have {needed}"
            f"{f' and {filling} of padding' if filling else ''}; files of several trainings?"
        )
    dtype, start = vector.parts[0].dtype, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        size = math.prod(shape)
        yield (
            name,
            FlatTensor(
                file=first.file,
                vectors=(vector,),
                start=start,
                piece=size,
                shape=shape,
                dtype=dtype,
            ),
        )
        start += size + padding


def _zip(
    models: Sequence[ModelStates], ranks: Sequence[OptimizerStates]
) -> Iterator[tuple[str, LazyTensor]]:
    """The masters of ZeRO-3."""
    model, first = models[0], ranks[0]
    vectors = tuple(FlatVector(rank.groups) for rank in ranks)
    pieces = {
        name: (shape, -(-math.prod(shape) // len(ranks)))
        for group in model.groups
        for name, shape in group.items()
    }
    needed = sum(piece for _, piece in pieces.values())
    for vector, rank in zip(vectors, ranks, strict=True):
        if len(vector) != needed:
            raise CheckpointError(
                f"{rank.file}: holds {len(vector)} elements, one of {len(ranks)} parts of the "
                f"parameters that {model.file.name} names has {needed}; files of several trainings?"
            )
    dtype, start = first.groups[0].dtype, 0
    for name, (shape, piece) in pieces.items():
        yield (
            name,
            FlatTensor(
                file=first.file, vectors=vectors, start=start, piece=piece, shape=shape, dtype=dtype
            ),
        )
        start += piece


def _frozen(models: Sequence[ModelStates], is_parted: bool) -> Iterator[tuple[str, LazyTensor]]:
    """What is not trained: whole in ZeRO-2, of each rank a piece in ZeRO-3."""
    for name, shape in models[0].frozen.items():
        size = math.prod(shape)
        piece = -(-size // len(models)) if is_parted else size
        for model in models:
            found = model.fragments.get(name)
            if found is None or found.numel() != piece:
                there = "none" if found is None else f"{found.numel()} elements"
                raise CheckpointError(
                    f"{model.file}: frozen_param_fragments of {name} must have {piece} elements, "
                    f"found {there}"
                )
        fragments = [model.fragments[name].reshape(-1) for model in models]
        yield name, FlatTensor(
            file=models[0].file, vectors=tuple(FlatVector([one]) for one in fragments),
            start=0, piece=max(piece, 1), shape=shape, dtype=fragments[0].dtype,
        )  # fmt: skip


def _add_rest(
    models: Sequence[ModelStates], tensors: dict[str, LazyTensor], *, is_parted: bool
) -> None:
    """What has no master: frozen, shared, buffers, and all there is where nothing is parted."""
    model = models[0]
    for name, tensor in _frozen(models, is_parted):
        if name in tensors:
            raise CheckpointError(
                f"{model.file}: {name} is in param_shapes and in frozen_param_shapes; expected one"
            )
        tensors[name] = tensor
    for name in model.module:
        is_stored = not is_parted or name in model.buffers
        if is_stored and name not in tensors and name not in model.shared:
            tensors[name] = StoredTensor(file=model.file, tensor=model.module[name])
    for name, holder in model.shared.items():
        if holder in tensors:
            tensors[name] = tensors[holder]
    for name in sorted(model.module.keys() - tensors.keys()):
        raise CheckpointError(
            f"{model.file}: tensor {name} is neither in param_shapes nor in frozen_param_shapes: "
            "no file holds its values"
        )
    for name, tensor in tensors.items():
        _check_shape(model, name, tensor, is_parted)


def _check_shape(model: ModelStates, name: str, tensor: LazyTensor, is_parted: bool) -> None:
    found = model.module.get(name)
    if found is None:
        field = "frozen_param_shapes" if name in model.frozen else "param_shapes"
        raise CheckpointError(
            f"{model.file}: {field} names {name}, which its module lacks; expected both"
        )
    # Where ZeRO-3 has taken the weights, the module's tensors are empty.
    if not is_parted and tuple(found.shape) != tensor.shape:
        raise CheckpointError(
            f"{model.file}: {name} has shape {list(tensor.shape)} by param_shapes and "
            f"{list(found.shape)} in the module; expected the same"
        )
