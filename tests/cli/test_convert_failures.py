"""`moe-serve convert`: whatever goes wrong leaves nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.checkpoint import Checkpoint
from moe_serve.cli import main
from moe_serve.convert import new_folder as new_folder_module
from moe_serve.errors import CheckpointError, ConfigError
from tests.cli.converted import check_sums, names


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks 1 of the model's tensors"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "has 1 tensors that"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 64)}), "[320, 64]"),
    ],
)
def test_a_model_that_is_not_whole_is_refused_before_anything_is_written(
    edit: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    random_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((random_model / "config.json").read_bytes())
    tensors = load_file(random_model / "model.safetensors")
    edit(tensors)
    save_file(tensors, source / "model.safetensors")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert names(tmp_path) == ["source"]


def test_files_that_turn_out_broken_leave_nothing_behind(
    random_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = Checkpoint.read

    def broken(self: Checkpoint, parts: Any) -> Iterator[Any]:
        for count, part in enumerate(read(self, parts)):
            if count == 17:
                assert [name.rpartition("-")[0] for name in names(tmp_path)] == ["out.partial"]
                raise CheckpointError("model.safetensors: became shorter while it was read")
            yield part

    monkeypatch.setattr(Checkpoint, "read", broken)
    assert main(["convert", str(random_model), str(tmp_path / "out")]) == 2
    assert "became shorter" in capsys.readouterr().err
    assert names(tmp_path) == []


def test_a_full_disk_leaves_nothing_behind(
    random_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, left = os.pwrite, 100_000

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # As the system does: what fits, and an error only then.
        num_written = write(descriptor, data[:left], offset)
        left -= num_written
        return num_written

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert main(["convert", str(random_model), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "model.safetensors: cannot be written: No space left on device" in error
    assert names(tmp_path) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    random_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Usage:
        free = 7

    monkeypatch.setattr(new_folder_module.shutil, "disk_usage", lambda path: Usage)
    assert main(["convert", str(random_model), str(tmp_path / "out")]) == 2
    assert "bytes, its disk has 7 left; free some" in capsys.readouterr().err
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("source", "is the folder to be converted"),
        ("link", "is the folder to be converted"),
        ("source/out", "lies inside"),
        ("link/out", "lies inside"),
        ("full", "full is not empty"),
        ("file", "is a file"),
        ("absent/out", "there is no folder"),
        ("/proc", "is a mount point"),
        ("/proc/out", "cannot be written"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_clear_error(
    out: str,
    message: str,
    random_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(random_model, tmp_path / "source")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").touch()
    (tmp_path / "file").touch()
    before = names(tmp_path)
    monkeypatch.setattr(new_folder_module, "_check_space", lambda out, num_bytes: None)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert names(tmp_path) == before


def test_an_empty_folder_is_filled_and_one_filled_meanwhile_is_left_alone(
    random_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    assert main(["convert", str(random_model), str(tmp_path / "out")]) == 0
    check_sums(tmp_path / "out")
    late = tmp_path / "late"
    with pytest.raises(ConfigError, match="late: cannot be written"):
        with new_folder_module.new_folder(late, 1):
            late.mkdir()
            (late / "mine").touch()
    assert names(tmp_path) == ["late", "out"]
    assert names(late) == ["mine"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: DIR, OUT"),
        (["a", "b", "--dtype", "float8"], "--dtype 'float8' must be one of auto, float32,"),
        (["a", "b", "--max-shard-size", "0"], "--max-shard-size '0' must be at least 1 byte"),
        (["a", "b", "--max-shard-size", "x"], "--max-shard-size 'x' is not a size"),
        (["a", "b", "--force"], "--force is not a flag of moe-serve convert"),
    ],
)
def test_flags_that_cannot_be(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *argv]) == 2
    assert message in capsys.readouterr().err


# Twice: says when a file has its first bytes, and then waits for the signal.
_STUCK = """
import signal, sys, time
from moe_serve.checkpoint import Checkpoint
from moe_serve.cli import main

# Where tests run in the background, it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

read = Checkpoint.read

def stuck(self, parts):
    for count, part in enumerate(read(self, parts)):
        yield part
        if count == 7:
            print("stuck", flush=True)
            time.sleep(60)

Checkpoint.read = stuck
print(main(sys.argv[1:]), flush=True)
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_to_end_leaves_nothing_behind(random_model: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _STUCK, "convert", str(random_model), str(tmp_path / "out")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                assert process.stdout.readline() == "stuck\n"
                (partial,) = tmp_path.iterdir()
                assert (partial / "model.safetensors").stat().st_size > 0
                process.send_signal(number)
                if number == signal.SIGINT:
                    assert process.stdout.readline() == "130\n"
                    assert names(tmp_path) == []
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert names(tmp_path) == []
