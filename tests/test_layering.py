"""Who may import whom. Read off the source, so an import inside a function counts too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Folder -> what of moe_serve it may import besides itself.
ALLOWED = {
    "kernels": {"context", "errors"},
    # Of kernels no more than what compiles.
    "parallel": {"config", "errors", "kernels"},
    "routing": {"kernels", "parallel"},
    "experts": {"errors", "kernels", "parallel", "routing"},
    "api": {
        "__version__", "chat", "choices", "config", "detokenizer", "engine_client", "errors",
        "experts", "logs", "messages", "metrics", "output", "reports", "sampling_params",
        "stop_matcher", "token_bytes", "tokenizer", "wire",
    },
}  # fmt: skip
KERNEL_LIBRARIES = {"torch", "triton", "moe_serve"}
MAY_IMPORT_API = {"moe_serve.serve", "moe_serve.cli.serve", "moe_serve.bench.step.serving"}
PURE = [
    "scheduler", "block_manager", "block_pool", "request", "request_queue", "step", "messages",
    "lane", "lane_choice", "step_codec", "rank_messages", "token_routes", "route_recorder",
    "parallel.degrees", "parallel.layout", "parallel.shard", "routing.traffic",
    "experts.placement", "experts.balance", "experts.recording", "experts.step_cost",
    "experts.moving.migration", "convert.shards",
]  # fmt: skip
# All that is in there.
PURE_FOLDERS = ["api", "experts/balancing", "experts/files", "experts/analysis"]


def modules(top: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of each module under a real folder; links are not followed."""
    for folder, _, names in os.walk(ROOT / top):
        for file in sorted(Path(folder, name) for name in names if name.endswith(".py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts if top == "moe_serve" else ("moe_serve", *parts)
            yield ".".join(part for part in parts if part != "__init__"), file


def imports(file: Path) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def units(file: Path) -> set[str]:
    """The parts of moe_serve that a file imports: 'kernels', 'config' ..."""
    return {name.split(".")[1] for name in imports(file) if name.startswith("moe_serve.")}


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    wrong = {
        name: sorted(extra)
        for name, file in modules(folder)
        if (extra := units(file) - ALLOWED[folder] - {folder})
    }
    assert wrong == {}


def test_kernels_use_torch_and_triton_and_no_other_library() -> None:
    known = KERNEL_LIBRARIES | set(sys.stdlib_module_names)
    wrong = {
        name: sorted(extra)
        for name, file in modules("kernels")
        if (extra := {imported.split(".")[0] for imported in imports(file)} - known)
    }
    assert wrong == {}


def test_only_the_server_start_and_a_benchmark_of_it_import_the_api() -> None:
    users = {name for name, file in modules("moe_serve") if "api" in units(file)}
    assert users - MAY_IMPORT_API == set()


def pure_modules() -> list[str]:
    names = [
        f"moe_serve.{name}"
        for name in PURE
        if (ROOT / f"moe_serve/{name.replace('.', '/')}.py").exists()
    ]
    return names + [name for folder in PURE_FOLDERS for name, _ in modules(folder)]


def test_the_pure_modules_are_found() -> None:
    assert {"moe_serve.messages", "moe_serve.api"} <= set(pure_modules())


def test_scheduling_and_the_api_run_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *pure_modules()], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_offline_use_needs_no_library_of_the_server_and_on_a_cpu_no_triton() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'uvicorn', 'zmq', 'msgspec', 'pydantic', 'pydantic_settings',\n"
        "             'prometheus_client', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "from moe_serve import LLM, SamplingParams\n"
        "with LLM('builtin', device='cpu', num_threads=1) as llm:\n"
        "    params = SamplingParams(max_tokens=2, seed=0, top_p=0.9)\n"
        "    (result,) = llm.generate([[1, 2, 3]], params)\n"
        "assert len(result.outputs[0].token_ids) == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
