"""One set of tensors from those of several model-parallel ranks, by what config.json asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_serve.deepspeed_checkpoint.lazy_tensor import (
    AgreedTensor,
    JoinedTensor,
    LazyTensor,
    Shape,
)
from moe_serve.errors import CheckpointError

# Of each expert, gate over up: a rank's rows of it would be of both.
_FUSED = "gate_up_proj"


def merge_mp_ranks(
    ranks: Sequence[Mapping[str, LazyTensor]], expected: Mapping[str, Shape]
) -> dict[str, LazyTensor]:
    """`expected`: shapes of the whole model's tensors. A tensor that has it is a copy, the same on
    all ranks bit by bit, which is checked as it is read; one that is smaller by the number of ranks
    along a single dimension is a part, and the ranks' parts lie side by side along that.

    Raises `CheckpointError` for a tensor that is neither, or not on all ranks.
    """
    first = ranks[0]
    for rank in ranks[1:]:
        for name in sorted(first.keys() ^ rank.keys()):
            has, lacks = (first, rank) if name in first else (rank, first)
            other = next(iter(lacks.values())).file
            raise CheckpointError(
                f"{has[name].file}: holds {name}, which is in no file of the mp rank of "
                f"{other.name}; expected it on all {len(ranks)}"
            )
    return {name: _merge(name, [rank[name] for rank in ranks], expected) for name in first}


def _merge(name: str, parts: Sequence[LazyTensor], expected: Mapping[str, Shape]) -> LazyTensor:
    first = parts[0]
    for part in parts[1:]:
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{part.file}: {name} is {part.dtype} of shape {list(part.shape)}, in "
                f"{first.file.name} {first.dtype} of {list(first.shape)}; expected the same"
            )
    # What the model has no place for is refused by name when it is loaded.
    whole = expected.get(name, first.shape)
    if first.shape == whole:
        return AgreedTensor(name=name, copies=tuple(parts))
    dims = [dim for dim, size in enumerate(first.shape) if whole[dim : dim + 1] != (size,)]
    fits = len(first.shape) == len(whole) and len(dims) == 1
    if not fits or first.shape[dims[0]] * len(parts) != whole[dims[0]]:
        raise CheckpointError(
            f"{first.file}: {name} has shape {list(first.shape)} on {len(parts)} mp ranks; "
            f"expected {list(whole)}, or one dimension of it divided by {len(parts)}"
        )
    if name.endswith(_FUSED) and dims[0] == len(whole) - 2:
        raise CheckpointError(
            f"{first.file}: {name} of shape {list(first.shape)} is a part of gate and up in one; "
            "expected them whole, or as tensors of their own, as their order in a part is not told"
        )
    return JoinedTensor(parts=tuple(parts), dim=dims[0])
