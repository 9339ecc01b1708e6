"""Where a step waits for the GPU is marked. Read off the source, so without a GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PURE_ROUTING = {"traffic.py"}
# What a step runs. Twins run on the CPU only, where waiting costs nothing.
STEP_PATH = [
    *(file for file in (ROOT / "routing").glob("*.py") if file.name not in PURE_ROUTING),
    *(ROOT / "experts" / f"{name}.py" for name in ("bank", "layer", "load", "tensor_parallel")),
    *(ROOT / "kernels").glob("*.py"),
    *(ROOT / "parallel").glob("group.py"),
    *(ROOT / "parallel").glob("slices.py"),
    *(ROOT / "moe_serve" / "layers").glob("*.py"),
    *(
        ROOT / "moe_serve" / f"{name}.py"
        for name in (
            "batch", "context", "decode_graphs", "logit_edits", "logprobs", "model_runner",
            "models/decoder", "route_capture", "sampler", "upload",
        )
    ),
]  # fmt: skip
WAITING = {"cpu", "item", "nonzero", "numpy", "synchronize", "tolist"}
MARK = "# sync:"
# Lines above the call that may hold the mark: a comment may take two.
REACH = 3
# Functions of kernel files that never see a tensor of a GPU.
ON_HOST = ("_torch", "_twin")


def waiting_calls(tree: ast.AST, is_kernel: bool) -> Iterator[ast.Call]:
    for node in ast.iter_child_nodes(tree):
        if is_kernel and isinstance(node, ast.FunctionDef) and not is_launcher(node, tree):
            continue
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in WAITING
        ):
            yield node
        yield from waiting_calls(node, is_kernel)


def is_launcher(function: ast.FunctionDef, tree: ast.AST) -> bool:
    return function.name.endswith("_triton") or function.name.startswith("_launch")


def unmarked(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    calls = waiting_calls(ast.parse(file.read_text()), file.parent.name == "kernels")
    return [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for call in calls
        if not any(MARK in line for line in lines[max(0, call.lineno - 1 - REACH) : call.lineno])
    ]


def test_every_wait_for_the_gpu_is_marked() -> None:
    assert [place for file in STEP_PATH for place in unmarked(file)] == []


def test_a_wait_without_a_mark_is_found(tmp_path: Path) -> None:
    source = "def step(x):\n    # sync: why\n    x.tolist()\n\n\n\n    return x.item()\n"
    file = ROOT / "experts" / "load.py"
    calls = list(waiting_calls(ast.parse(source), is_kernel=False))
    assert [call.lineno for call in calls] == [3, 7]
    assert file in STEP_PATH
