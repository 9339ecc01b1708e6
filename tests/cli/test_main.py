from __future__ import annotations

import io
import logging
import subprocess
import sys
import types
from typing import Any

import pytest

import moe_serve
from moe_serve import logs
from moe_serve.cli import COMMANDS, main
from moe_serve.config import ServeConfig
from moe_serve.errors import CheckpointError, EngineDeadError
from moe_serve.output import OutputDelta, SequenceOutput
from moe_serve.parallel.degrees import Degrees, RankSeat
from moe_serve.sampling_params import SamplingParams


class FakeLLM:
    """Answers each prompt with '!' and keeps what it was asked."""

    calls: list[tuple[dict[str, Any], list[str], SamplingParams]] = []

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
        FakeLLM.calls.append((self.options, prompts, params))
        output = SequenceOutput(request_id="0")
        error = "broken" if "fail" in prompts else None
        output.add(
            OutputDelta(
                request_id="0", text="!", finish_reason="error" if error else "stop", error=error
            )
        )
        return [types.SimpleNamespace(outputs=[output]) for _ in prompts]


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = types.ModuleType("moe_serve.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moe_serve.llm", module)
    FakeLLM.calls = []
    return FakeLLM


def fake_run(monkeypatch: pytest.MonkeyPatch, name: str, run: Any) -> None:
    """`run` in place of moe_serve.<name>'s."""
    module = types.ModuleType(f"moe_serve.{name}")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"moe_serve.{name}", module)
    monkeypatch.setattr(moe_serve, name, module, raising=False)


def run_python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["serve", "--help"],
                                  ["generate", "--help"], ["serve", "--prot"]])  # fmt: skip
def test_a_quick_answer_loads_no_heavy_library(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from moe_serve.cli import main\n"
        "try:\n"
        f"    main({argv!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'fastapi', 'zmq'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_loads_no_torch_and_names_are_lazy() -> None:
    code = "import sys, moe_serve; moe_serve.SamplingParams; assert 'torch' not in sys.modules"
    assert run_python("-c", code).returncode == 0
    assert moe_serve.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = moe_serve.nothing_like_it  # type: ignore[attr-defined]


def test_python_dash_m_is_the_same_command() -> None:
    result = run_python("-m", "moe_serve", "version")
    assert (result.returncode, result.stdout) == (0, f"moe-serve {moe_serve.__version__}\n")
    result = run_python("-m", "moe_serve", "serve", "--prot", "1")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "moe-serve: error: --prot is not a flag of moe-serve serve; did you mean --port?\n"
    )


def test_serve_hands_over_its_config_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[ServeConfig, bool]] = []

    def run(config: ServeConfig, *, is_launched: bool) -> int:
        seen.append((config, is_launched))
        return 3

    fake_run(monkeypatch, "serve", run)
    assert main(["serve", "x", "--port", "0"]) == 3
    assert seen == [(ServeConfig(model="x", port=0), False)]


@pytest.mark.parametrize(
    ("rank", "argv", "expected"),
    [
        (None, ["-tp", "1"], ("serve", False)),
        (None, ["-tp", "2", "-dp", "3"], ("launch", Degrees(2, 3))),
        (None, ["-dp", "2"], ("launch", Degrees(1, 2))),
        (0, ["-tp", "2"], ("serve", True)),
        (1, [], ("rank_process", 1)),
    ],
)
def test_serve_starts_ranks_or_is_one(
    rank: int | None, argv: list[str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are started where more than one is asked for and no launcher has done it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if rank is not None:
        for name, value in zip(names, (rank, 2, rank, 2, "localhost", 29500), strict=True):
            monkeypatch.setenv(name, str(value))
    seen: list[Any] = []

    def serve(config: ServeConfig, *, is_launched: bool) -> int:
        seen.append(("serve", is_launched))
        return 3

    def launch(config: ServeConfig, argv: list[str], degrees: Degrees) -> int:
        seen.append(("launch", degrees))
        return 3

    def rank_process(config: ServeConfig, seat: RankSeat) -> int:
        seen.append(("rank_process", seat.rank))
        return 3

    for run in (serve, launch, rank_process):
        fake_run(monkeypatch, run.__name__, run)
    assert main(["serve", *argv]) == 3
    assert seen == [expected]


@pytest.mark.parametrize("name", ["--local_rank", "--local-rank"])
def test_the_rank_that_deepspeed_puts_before_the_command_is_passed_over(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main([f"{name}=1", "version"]) == 0
    assert capsys.readouterr().out == f"moe-serve {moe_serve.__version__}\n"
    # Nobody's: not this rank's, or from no launcher.
    assert main([f"{name}=0", "version"]) == 2
    monkeypatch.delenv("LOCAL_RANK")
    assert main([f"{name}=1", "version"]) == 2
    assert f"'{name}=1' is not a command" in capsys.readouterr().err


def test_serve_refuses_half_of_a_launchers_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["serve"]) == 2
    assert "RANK set without WORLD_SIZE, LOCAL_RANK" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(CheckpointError("no such\nfolder"), 2), (EngineDeadError("no such folder"), 1)],
)
def test_our_errors_become_one_line(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(config: ServeConfig, *, is_launched: bool) -> int:
        raise error

    fake_run(monkeypatch, "serve", run)
    assert main(["serve"]) == code
    assert capsys.readouterr().err == "moe-serve: error: no such folder\n"


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: ServeConfig, *, is_launched: bool) -> int:
        raise KeyboardInterrupt

    fake_run(monkeypatch, "serve", run)
    assert main(["serve"]) == 130


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "which command?"), (["serv"], "'serv' is not a command; did you mean serve?")],
)
def test_an_unknown_command_names_the_known_ones(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert message in text
    assert ", ".join(COMMANDS) in text


def test_generate_prints_each_prompt_with_its_completion(
    fake_llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "m", "--prompt", "a, b", "--prompt", "c", "--max-tokens", "7", "--seed=1",
            "--temperature", "0", "--block-size", "8"]  # fmt: skip
    assert main(argv) == 0
    assert capsys.readouterr().out == "a, b!\n----\nc!\n"
    [(options, prompts, params)] = fake_llm.calls
    assert (options["model"], options["block_size"]) == ("m", 8)
    assert "prompt" not in options
    assert prompts == ["a, b", "c"]
    assert params == SamplingParams(max_tokens=7, temperature=0, seed=1)


def test_generate_reads_standard_input(
    fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(["generate"]) == 0
    assert fake_llm.calls[0][1] == ["two\nlines"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "3", "--prompt", "x"], "temperature 3.0 must be a finite number"),
        ([], "standard input is empty"),
    ],
)
def test_generate_refuses_what_cannot_be_before_a_model_is_loaded(
    argv: list[str],
    message: str,
    fake_llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", *argv]) == 2
    assert message in capsys.readouterr().err
    assert fake_llm.calls == []


def test_a_log_line_has_level_role_and_module_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("moe_serve")
    before = (list(logger.handlers), logger.level)
    try:
        logs.set_up("debug", role="engine")
        logs.set_up("warning", role="server")
        logging.getLogger("moe_serve.scheduler").info("hidden")
        logging.getLogger("moe_serve.scheduler").warning("pool is full")
        [line] = capsys.readouterr().err.splitlines()
        assert line.split(" ", 1)[1] == "WARNING server test_main: pool is full"
    finally:
        logger.handlers[:], level = before
        logger.setLevel(level)


def test_generate_tells_of_a_sequence_that_failed(
    fake_llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "fail"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "broken" in err
