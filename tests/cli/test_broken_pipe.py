"""`moe-serve ... | head` ends quietly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_serve import cli
from moe_serve.cli import main
from moe_serve.experts.files.route_files import write_routes
from tests.experts.recordings import random_routes


def run_without_reader(*argv: str) -> subprocess.CompletedProcess[str]:
    """Its output is a pipe that was closed on the other side before it began."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "moe_serve", *argv],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    finally:
        os.close(writer)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    trace = tmp_path / "routes.npz"
    write_routes(random_routes(0, 17, 2, 7, 2), trace)
    # Few lines, which would stay in a buffer until the exit, and many.
    for argv in (["--help"], ["plan", "--trace", str(trace), "--ep=2", "--json"]):
        result = run_without_reader(*argv)
        assert (result.returncode, result.stderr) == (1, "")


def test_another_broken_pipe_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: list[str]) -> int:
        raise BrokenPipeError("of a rank")

    monkeypatch.setattr(cli, "_run", broken)
    with pytest.raises(BrokenPipeError, match="of a rank"):
        main(["version"])
