"""The CPU kernels are built where they can be; where not, one line says why and all goes on."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu import build, library

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and nothing loaded or active before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load = library.load
    load.cache_clear()
    yield
    load.cache_clear()
    library.choose(library.NONE, 1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "CPU kernels" in record.message]


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C++ compiler found"), ("false", "fails")]
)
def test_without_a_compiler_the_engine_starts_and_says_so_once(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING), LLM("builtin", dtype="float32") as llm:
        answer = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert library.active() is None
    assert answer.outputs[0].num_output_tokens == 4
    [line] = warnings(caplog)
    # A handler that keeps records must not keep an engine by an error's frames.
    assert not any(isinstance(arg, Exception) for r in caplog.records for arg in r.args or ())
    assert reason in line and "PyTorch" in line and "\n" not in line
    with pytest.raises(ConfigError, match="--cpu-kernels avx2: .*use auto"):
        LLM("builtin", cpu_kernels="avx2")


def test_instructions_that_the_cpu_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernels:
        instructions = ""

        def choose(self, name: str) -> bool:
            return False

    monkeypatch.setattr(library, "load", lambda: Kernels())
    with pytest.raises(ConfigError, match="--cpu-kernels amx: this machine cannot run them"):
        LLM("builtin", cpu_kernels="amx")
    with LLM("builtin") as llm:
        assert llm.generate([[1]], GREEDY)[0].outputs[0].num_output_tokens == 4


def test_named_instructions_need_a_type_that_they_have() -> None:
    with pytest.raises(ConfigError, match="--cpu-kernels avx2: they have no float16; use auto"):
        LLM("builtin", dtype="float16", cpu_kernels="avx2")


def fake_compile(compiler: str, extra: Any, file: Path) -> None:
    with file.open("x") as made:
        made.write("library")


def test_it_is_built_once_for_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(build, "_compile", fake_compile)
    file = build.build()
    assert build.build() == file and file.is_relative_to(tmp_path)
    assert build.build(emulate_amx=True) != file
    monkeypatch.setattr(build, "_FLAGS", ("-O0",))
    assert build.build() != file


def test_a_cache_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(build, "_compile", fake_compile)
    file = build.build()
    assert file.read_text() == "library" and not file.is_relative_to(tmp_path)


def test_a_set_that_the_compiler_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[str] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(command))
        failed = "-mamx-bf16" in command
        if "-o" in command and not failed:
            Path(command[command.index("-o") + 1]).write_text("")
        return subprocess.CompletedProcess(command, failed, "", "error: unrecognized -mamx-bf16")

    monkeypatch.setattr(build.subprocess, "run", run)
    build._compile("g++", (), tmp_path / "library.so")
    assert (tmp_path / "library.so").exists()
    linked = commands[-1]
    assert "-DMOE_SERVE_HAS_AVX2" in linked and "-DMOE_SERVE_HAS_AVX512_BF16" in linked
    assert "AMX" not in linked and "amx.o" not in linked


@pytest.mark.parametrize("name", build.SETS)
def test_each_set_compiles_wherever_the_compiler_knows_it(name: str, tmp_path: Path) -> None:
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    flags = (*build._FLAGS, *build.SETS[name])
    if build._run([compiler, *flags, "-c", str(empty), "-o", str(tmp_path / "empty.o")]):
        pytest.skip(f"{compiler} has no {name}")
    source, table = str(build.SOURCES / "kernels.cpp"), "-DMOE_SERVE_KERNELS=kernels_x"
    command = [compiler, *flags, "-O0", table, "-c", source, "-o", str(tmp_path / "kernels.o")]
    assert build._run(command) is None
