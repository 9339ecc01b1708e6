"""Parts of tensors that lie in pieces, against slices of the whole; and what memory it takes."""

from __future__ import annotations

import gc
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_serve.deepspeed_checkpoint.lazy_tensor import FlatTensor, FlatVector, JoinedTensor
from moe_serve.deepspeed_checkpoint.source import open_deepspeed
from moe_serve.parallel.shard import Span
from tests.deepspeed.checks import whole_tensors

FILE = Path("f.pt")
SIZES = st.sampled_from([0, 1, 2, 3, 7])


def cut_at(vector: Tensor, places: list[int]) -> list[Tensor]:
    bounds = [0, *sorted(place % (len(vector) + 1) for place in places), len(vector)]
    return [vector[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@given(st.data(), st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 4))
def test_a_part_is_a_slice_of_the_whole(
    data: st.DataObject, shape: list[int], num_ranks: int, start: int
) -> None:
    size = math.prod(shape)
    whole = torch.arange(size, dtype=torch.float32).view(shape)
    box = tuple(
        Span(*sorted(data.draw(st.tuples(st.integers(0, one), st.integers(0, one)))))
        for one in shape
    )
    places = data.draw(st.lists(st.integers(0, 50), max_size=4))
    # ZeRO-1 and -2: one vector, cut anywhere, something before and after the tensor.
    around = torch.nn.functional.pad(whole.reshape(-1), (start, 3), value=-1.0)
    cut = FlatTensor(
        file=FILE, vectors=(FlatVector(cut_at(around, places)),), start=start, piece=size,
        shape=tuple(shape), dtype=whole.dtype,
    )  # fmt: skip
    # ZeRO-3: of each rank a piece, and each rank's vector in groups.
    piece = -(-size // num_ranks)
    pieces = torch.nn.functional.pad(whole.reshape(-1), (0, piece * num_ranks - size), value=-1.0)
    ranks = [
        torch.nn.functional.pad(one, (start, 2), value=-2.0)
        for one in (pieces.split(piece) if piece else [pieces] * num_ranks)
    ]
    zipped = FlatTensor(
        file=FILE, vectors=tuple(FlatVector(cut_at(one, places)) for one in ranks), start=start,
        piece=piece, shape=tuple(shape), dtype=whole.dtype,
    )  # fmt: skip
    expected = whole[tuple(slice(*span) for span in box)]
    for lazy in (cut, zipped):
        found = lazy.read(box)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
    if shape[0]:
        for dim in range(len(shape)):
            joined = JoinedTensor(parts=(cut, zipped, cut), dim=dim)
            twice = torch.cat([whole] * 3, dim=dim)
            assert joined.shape == twice.shape
            wide = list(box)
            wide[dim] = Span(box[dim].start, 2 * shape[dim] + box[dim].stop)
            assert torch.equal(joined.read(tuple(wide)), twice[tuple(slice(*one) for one in wide)])


def anonymous_bytes() -> int:
    """Of this process: memory that no file backs, so that it cannot just be dropped."""
    gc.collect()
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("num_ranks", [2, 6])
def test_memory_does_not_grow_with_the_number_of_shards(tmp_path: Path, num_ranks: int) -> None:
    pytest.importorskip("deepspeed")
    num_layers, rows, columns = 6, 1024, 256 * num_ranks
    step = tmp_path / "global_step1"
    step.mkdir()
    (tmp_path / "latest").write_text(step.name)
    shapes = {f"model.layers.{i}.weight": torch.Size((rows, columns)) for i in range(num_layers)}
    model = {
        "module": {name: torch.empty(0) for name in shapes}, "param_shapes": [shapes],
        "global_steps": 1, "mp_world_size": 1,
    }  # fmt: skip
    for rank in range(num_ranks):
        # The weights and Adam's two moments.
        group, *moments = (torch.full((num_layers * rows * 256,), float(rank)) for _ in range(3))
        states = {"zero_stage": 3, "partition_count": num_ranks, "fp32_flat_groups": [group],
                  "optimizer_state_dict": {"state": {0: {"moments": moments}}}}  # fmt: skip
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": states}, step / f"{name}_optim_states.pt")
        torch.save(model, step / f"{name}_model_states.pt")
    largest = max(file.stat().st_size for file in step.iterdir())
    layer = rows * columns * 4
    del group, moments, states
    before = anonymous_bytes()
    source = open_deepspeed(tmp_path)
    boxes = {name: [(Span(0, rows), Span(0, columns))] for name in shapes}
    most = 0
    for _, _, tensor in source.read(boxes):
        assert tensor.nbytes == layer
        most = max(most, anonymous_bytes() - before)
        del tensor
    # One, and what the allocator may keep of the ones before.
    assert most < 3 * layer
    assert 3 * layer < min(num_layers * layer, 1.5 * largest + layer, num_ranks * largest)
    assert whole_tensors(source)["model.layers.5.weight"][-1, -1] == num_ranks - 1
