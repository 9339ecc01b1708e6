"""What a folder holds that `moe-serve convert` made."""

from __future__ import annotations

import subprocess
from pathlib import Path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_sums(folder: Path) -> None:
    """By the usual tool; every file but the list itself is in it."""
    result = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    checked = [line.removesuffix(": OK") for line in result.stdout.splitlines()]
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted([*checked, "SHA256SUMS"]) == sorted(files)
