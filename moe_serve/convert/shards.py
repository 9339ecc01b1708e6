"""Which bytes of which file each tensor to be written gets. Pure: shapes in, places out.

The format is safetensors' (https://github.com/huggingface/safetensors, "Format"): 8 bytes with the
header's length, little-endian; the header, a JSON object that may end in spaces; the tensors' bytes
without holes, their offsets counted from the header's end. File and index names are transformers'.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping

Shape = tuple[int, ...]

# So that the tensors' bytes begin at a multiple of it.
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Bytes [start, start + num_bytes) of a file."""

    start: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file to be written: `head`, and the tensors' bytes at their places, without holes."""

    name: str
    head: bytes
    places: Mapping[str, Place]

    @property
    def tensor_bytes(self) -> int:
        return sum(place.num_bytes for place in self.places.values())

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return len(self.head) + self.tensor_bytes


def plan_shards(
    shapes: Mapping[str, Shape], *, dtype: str, itemsize: int, max_bytes: int
) -> list[Shard]:
    """Tensors in the order given; a file ends before its tensors would take over `max_bytes`.

    A larger tensor gets a file of its own. `dtype` is safetensors' name.

    Example: sizes 4 4 4 9 1 at most 8 a file: (4 4) (4) (9) (1).
    """
    groups = list(_groups(shapes, itemsize, max_bytes))
    shards = []
    for number, names in enumerate(groups, start=1):
        own = {name: shapes[name] for name in names}
        shards.append(_shard(_file_name(number, len(groups)), own, dtype, itemsize))
    return shards


def index_text(shards: list[Shard]) -> str:
    """What model.safetensors.index.json holds."""
    weight_map = {name: shard.name for shard in shards for name in shard.places}
    total = sum(shard.tensor_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def _groups(shapes: Mapping[str, Shape], itemsize: int, max_bytes: int) -> Iterator[list[str]]:
    """Names, file by file."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * itemsize
        if group and size + num_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += num_bytes
    yield group


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shard(name: str, shapes: Mapping[str, Shape], dtype: str, itemsize: int) -> Shard:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    sizes: dict[str, int] = {}
    end = 0
    for tensor, shape in shapes.items():
        sizes[tensor] = math.prod(shape) * itemsize
        offsets = [end, end + sizes[tensor]]
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    places = {}
    start = len(head)
    for tensor, size in sizes.items():
        places[tensor] = Place(start=start, num_bytes=size)
        start += size
    return Shard(name=name, head=head, places=places)
