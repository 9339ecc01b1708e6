"""Convert a checkpoint: all checks, then one pass into a new folder, then a check of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from moe_serve.checkpoint import FLOAT_DTYPES, INDEX_NAME, Checkpoint, TensorInfo
from moe_serve.config import DTypeName
from moe_serve.convert.new_folder import new_folder
from moe_serve.convert.outputs import Output, plan_outputs
from moe_serve.convert.shard_file import write_shard
from moe_serve.convert.shards import Shard, index_text, plan_shards
from moe_serve.convert.side_files import (
    CHECKSUMS_NAME,
    checksums_text,
    read_side_files,
    write_side_files,
)
from moe_serve.errors import CheckpointError
from moe_serve.loader import Plan, check_coverage, make_plan, parameter_shapes, refuse_quantised
from moe_serve.model_folder import ModelFolder
from moe_serve.models.decoder import Decoder
from moe_serve.models.registry import find_family
from moe_serve.tensor_source import TensorSource

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

# What to call with each part's bytes.
Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that can be done, as far as anything but writing can tell.

    `dtype`: transformers' name. `left_out`: tensors of the source that no model needs.
    """

    model: ModelFolder
    source: TensorSource
    out: Path
    dtype: str
    outputs: Mapping[str, Output]
    shards: list[Shard]
    side_files: Mapping[str, bytes]
    left_out: list[str]

    @property
    def tensor_bytes(self) -> int:
        return sum(shard.tensor_bytes for shard in self.shards)

    def write(self, advance: Advance) -> None:
        """Raises `ConfigError` for what the disk refuses or a value that does not fit `dtype`.

        Whatever it raises, nothing of `out` is there then.
        """
        dtype = FLOAT_DTYPES[_DTYPES[self.dtype]]
        texts = dict(self.side_files)
        if len(self.shards) > 1:
            texts[INDEX_NAME] = index_text(self.shards).encode()
        num_bytes = sum(shard.num_bytes for shard in self.shards) + sum(map(len, texts.values()))
        with new_folder(self.out, num_bytes) as folder:
            digests = write_side_files(folder, texts)
            for shard in self.shards:
                outputs = [self.outputs[name] for name in shard.places]
                file = folder / shard.name
                digests[shard.name] = write_shard(file, shard, outputs, self.source, dtype, advance)
            write_side_files(folder, {CHECKSUMS_NAME: checksums_text(digests).encode()})
            # Reads every header and the index as the server will.
            make_checked_plan(self.model, Checkpoint.open(folder))


def prepare(
    model: ModelFolder, source: TensorSource, out: Path, dtype: DTypeName, max_shard_bytes: int
) -> Conversion:
    """Check all that can be known before writing to `out`, which is checked already.

    Raises `CheckpointError` for tensors missing, unknown or unfit.
    """
    plan = make_checked_plan(model, source)
    family = find_family(model.hf_config.architectures)
    outputs = plan_outputs(model.spec, family.names, plan)
    name = _pick_dtype(model, source.tensors) if dtype == "auto" else dtype
    shards = plan_shards(
        {output.name: output.shape for output in outputs},
        dtype=_DTYPES[name],
        itemsize=FLOAT_DTYPES[_DTYPES[name]].itemsize,
        max_bytes=max_shard_bytes,
    )
    return Conversion(
        model=model,
        source=source,
        out=out,
        dtype=name,
        outputs={output.name: output for output in outputs},
        shards=shards,
        side_files=read_side_files(model.path, name),
        left_out=sorted(source.tensors.keys() - plan.keys()),
    )


def make_checked_plan(model: ModelFolder, source: TensorSource) -> Plan:
    """What fills which parameter; every tensor has its place and every parameter all its rows."""
    refuse_quantised(model.hf_config)
    family = find_family(model.hf_config.architectures)
    plan = make_plan(model.spec, family.names, source)
    shapes = parameter_shapes(Decoder(model.spec, torch.bfloat16, torch.device("meta")))
    check_coverage(plan, shapes)
    return plan


def _pick_dtype(model: ModelFolder, tensors: Mapping[str, TensorInfo]) -> str:
    """The config's; where it tells none that of all tensors, or float32, which holds any."""
    wanted = getattr(model.hf_config, "dtype", None)
    if wanted is None:
        found = {FLOAT_DTYPES[info.dtype] for info in tensors.values()}
        wanted = found.pop() if len(found) == 1 else torch.float32
    name = str(wanted).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(
            f"{model.path}/config.json: dtype {name} is none to convert to; give --dtype, one of "
            f"{', '.join(_DTYPES)}"
        )
    return name
