"""The traps of linked folders and of a folder called `kernels`, each held shut by one test."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ["api", "experts", "kernels", "parallel", "routing"]


def python_files() -> list[Path]:
    folders = [ROOT / "moe_serve", *(ROOT / name for name in LINKED)]
    return [
        Path(folder, name)
        for top in folders
        for folder, _, names in os.walk(top)  # does not follow the links
        for name in names
        if name.endswith(".py")
    ]


@pytest.mark.parametrize("name", LINKED)
def test_a_sub_package_is_a_relative_link_to_its_folder(name: str) -> None:
    link = ROOT / "moe_serve" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_nothing_else_in_the_package_is_a_link() -> None:
    links = [path.name for path in (ROOT / "moe_serve").iterdir() if path.is_symlink()]
    assert sorted(links) == LINKED


@pytest.mark.parametrize("name", [name for name in LINKED if name != "kernels"])
def test_a_linked_folder_is_a_package_that_runs_nothing(name: str) -> None:
    lines = (ROOT / name / "__init__.py").read_text().strip().splitlines()
    text = "\n".join(lines)
    assert text.startswith('"""')
    assert text.endswith('"""')
    assert text.count('"""') == 2


def test_kernels_has_no_init_file_anywhere() -> None:
    # As a regular package it would shadow the third-party `kernels`, which transformers probes.
    assert not list((ROOT / "kernels").rglob("__init__.py"))


def test_kernels_folder_yields_to_an_installed_kernels_package(tmp_path: Path) -> None:
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("MARK = 1\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.MARK)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "1"


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    # Running a file puts its folder first on the path, where `queue.py` would be found first.
    names = [path for path in python_files() if path.stem in sys.stdlib_module_names]
    assert names == []


def test_no_two_spellings_of_a_folder_are_imported() -> None:
    # `kernels.x` and `moe_serve.kernels.x` would be two copies of one module.
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lint = config["tool"]["ruff"]["lint"]
    assert sorted(lint["flake8-tidy-imports"]["banned-api"]) == LINKED
    assert "TID" in lint["select"]


def test_every_data_file_of_the_package_is_packaged() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]
    missing = []
    for top in [ROOT / "moe_serve", *(ROOT / name for name in LINKED)]:
        for folder, folders, names in os.walk(top):
            folders[:] = [name for name in folders if name != "__pycache__"]
            parts = Path(folder).relative_to(ROOT).parts
            package = ".".join(parts if parts[0] == "moe_serve" else ("moe_serve", *parts))
            wanted = ["*.py", *patterns["*"], *patterns.get(package, [])]
            missing += [
                f"{package}: {name}"
                for name in names
                if not any(fnmatch.fnmatch(name, pattern) for pattern in wanted)
            ]
    assert missing == []


@pytest.mark.parametrize("name", ["check", "install", "serve", "test"])
def test_a_script_is_executable_and_valid_shell(name: str) -> None:
    script = ROOT / "scripts" / name
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_an_old_python_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "install"
    script.write_bytes((ROOT / "scripts" / "install").read_bytes())
    (tmp_path / "pyproject.toml").write_text("")
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.1 || exit 1\n')
    old.chmod(0o755)
    result = subprocess.run(
        ["bash", str(script)], env={**os.environ, "PYTHON": str(old)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 1
    assert f"needs Python 3.11 or newer; {old} is Python 3.10.1" in result.stderr
    assert not (tmp_path / ".venv").exists()
