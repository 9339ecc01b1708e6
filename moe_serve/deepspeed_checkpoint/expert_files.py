"""The experts of `deepspeed.moe.layer.MoE`: of each layer and expert one file, by global numbers.

Such a file is what the layer holds when it saves, in the dtype of the training: DeepSpeed 0.19,
`runtime/engine.py`, `_save_moe_checkpoint`. Which rank held the expert does not show in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_serve.deepspeed_checkpoint.lazy_tensor import LazyTensor, StoredTensor
from moe_serve.deepspeed_checkpoint.model_states import ModelStates, checked_tensors
from moe_serve.deepspeed_checkpoint.names import expert_of, family_name, moe_blocks
from moe_serve.deepspeed_checkpoint.safe_load import load_file
from moe_serve.deepspeed_checkpoint.step_files import ModelParallelFiles
from moe_serve.errors import CheckpointError
from moe_serve.models.names import CheckpointNames


def read_experts(files: ModelParallelFiles, model: ModelStates) -> dict[str, LazyTensor]:
    """All tensors of all experts, by DeepSpeed's names; `model`: the rest of the same rank.

    Raises `CheckpointError` for layers and experts too few or too many, and for what is in a file
    of another one.
    """
    _check_counts(files, model)
    tensors: dict[str, LazyTensor] = {}
    blocks: dict[int, str] = {}
    for (layer, expert), file in sorted(files.experts.items()):
        found = checked_tensors(file, "the file", load_file(file))
        for name in found:
            if expert_of(name) != expert:
                raise CheckpointError(
                    f"{file}: holds {name}; expected tensors <block>.deepspeed_moe.experts."
                    f"deepspeed_experts.{expert}.<matrix>.weight alone"
                )
            (block,) = moe_blocks([name])
            if blocks.setdefault(layer, block) != block:
                raise CheckpointError(
                    f"{file}: holds {name}, other files of layer_{layer} are of {blocks[layer]}; "
                    "expected one block a layer"
                )
            if name in tensors:
                raise CheckpointError(
                    f"{file}: holds {name}, as {tensors[name].file.name} does; expected it once"
                )
            tensors[name] = StoredTensor(file=file, tensor=found[name])
    return tensors


def rename(tensors: Mapping[str, LazyTensor], family: CheckpointNames) -> dict[str, LazyTensor]:
    """With the family's names in place of DeepSpeed's."""
    blocks = moe_blocks(tensors)
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        new = family_name(name, family, blocks, tensor.file)
        if new in renamed:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is the model's {new}, as another one in "
                f"{renamed[new].file.name} is; expected it once"
            )
        renamed[new] = tensor
    return renamed


def _check_counts(files: ModelParallelFiles, model: ModelStates) -> None:
    layers = sorted({layer for layer, _ in files.experts})
    folder = model.file.parent
    if len(layers) != len(model.num_experts):
        raise CheckpointError(
            f"{folder}: has expert files of {len(layers)} layers, {model.file.name} tells of "
            f"{len(model.num_experts)} (num_experts {list(model.num_experts)}); expected as many"
        )
    for layer, expected in zip(layers, model.num_experts, strict=True):
        found = sum(one == layer for one, _ in files.experts)
        if found != expected:
            raise CheckpointError(
                f"{folder}: has {found} files layer_{layer}_expert_*, {model.file.name} tells of "
                f"{expected} experts; expected as many"
            )
