"""Bytes that are read straight from checkpoint files into parameters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_serve import file_runs
from moe_serve.checkpoint import TensorInfo
from moe_serve.errors import CheckpointError
from moe_serve.file_runs import FileRun, read_runs
from moe_serve.parallel.shard import Span


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """A shape, and a part of at least one element."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple(
        Span(start, draw(st.integers(start + 1, size)))
        for start, size in zip(starts, shape, strict=True)
    )


@given(parts())
def test_a_part_is_a_run_where_its_elements_are_side_by_side(case) -> None:
    shape, part = case
    info = TensorInfo(file=Path("x"), dtype="F16", shape=shape, start=1000)
    indices = torch.arange(math.prod(shape)).view(shape)
    own = indices[tuple(slice(*span) for span in part)].flatten()
    first = int(own[0])
    is_run = own.tolist() == list(range(first, first + len(own)))
    assert info.run_start(part) == (1000 + 2 * first if is_run else None)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("piece_bytes", [1, 7, 17, 10**6])
def test_runs_of_several_files_fill_their_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, num_threads: int
) -> None:
    monkeypatch.setattr(file_runs, "PIECE_BYTES", piece_bytes)
    contents = {
        tmp_path / name: bytes(range(shift, 129 + shift)) for shift, name in [(0, "a"), (9, "b")]
    }
    for file, content in contents.items():
        file.write_bytes(content)
    runs, wanted = [], []
    for start, length in [(100, 29), (0, 1), (64, 17), (7, 2)]:
        for file, content in contents.items():
            runs.append(FileRun(file, start, torch.zeros(length, dtype=torch.uint8)))
            wanted.append(list(content[start : start + length]))
    assert sum(read_runs(runs, num_threads)) == 2 * (29 + 1 + 17 + 2)
    assert [run.target.tolist() for run in runs] == wanted


def test_a_target_may_be_a_part_of_a_parameter(tmp_path: Path) -> None:
    values = torch.randn(3, 5).bfloat16()
    (tmp_path / "x").write_bytes(b"head" + values.view(torch.uint8).numpy().tobytes())
    parameter = torch.nn.Parameter(torch.zeros(7, 5, dtype=torch.bfloat16))
    list(read_runs([FileRun(tmp_path / "x", 4, parameter.narrow(0, 2, 3))], 2))
    assert torch.equal(parameter[2:5], values)
    assert not parameter[:2].any() and not parameter[5:].any()


def test_a_file_that_shrinks_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "short.safetensors"
    file.write_bytes(bytes(10))
    runs = [FileRun(file, start, torch.zeros(8, dtype=torch.uint8)) for start in (0, 3)]
    with pytest.raises(CheckpointError, match=r"short\.safetensors: became shorter"):
        list(read_runs(runs, 2))


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = FileRun(tmp_path, 0, torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=f"{tmp_path}: cannot be read"):
        list(read_runs([run], 1))


def test_nothing_to_read_is_nothing_done() -> None:
    assert list(read_runs([], 4)) == []
