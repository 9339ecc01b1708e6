"""What the files of kernels share: Triton where it is installed, and where a kernel runs.

An op is up to four functions of one signature, of which callers use the first:

    op          the launcher on a GPU; on the CPU the C++ kernel where there is one, else the twin
    op_triton   launches the Triton kernel
    op_torch    its twin: plain PyTorch, on any device
    op_cpu      calls the C++ kernel, or declines (kernels/cpu)
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from moe_serve.kernels.targets import INTERPRETER, TARGETS, Target, nearest

__all__ = [
    "HAS_TRITON",
    "Launch",
    "TensorDescriptor",
    "by_device",
    "launch",
    "recorded",
    "target_of",
    "tl",
    "triton",
    "triton_everywhere",
]

P = ParamSpec("P")
R = TypeVar("R")


class _Absent:
    """Stands for Triton where there is none, so that kernel files still import for their twins."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, value: Any = None, **options: Any) -> Any:
        return self if value is None else value


def _is_wanted() -> bool:
    """Whether kernels may be launched or compiled here. Importing Triton takes a fifth of a second,
    for nothing where there is no GPU: unless somebody asks for its interpreter, or has it already.
    """
    is_asked_for = "TRITON_INTERPRET" in os.environ or "triton" in sys.modules
    return is_asked_for or torch.cuda.device_count() > 0


try:
    if not _is_wanted():
        raise ImportError
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = tl = TensorDescriptor = _Absent()

HAS_TRITON = not isinstance(triton, _Absent)


class Launch(NamedTuple):
    """A kernel, its grid, and what it is called with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Recording(NamedTuple):
    target: Target
    launches: list[Launch]


_recording: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar(
    "recording", default=None
)


_is_everywhere: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_everywhere", default=False
)


def by_device(
    on_gpu: Callable[P, R],
    twin: Callable[P, R],
    on_cpu: Callable[P, R | None] | None = None,
) -> Callable[P, R]:
    """The op that all compute: `on_gpu` unless the first argument is on the CPU.

    There it is `on_cpu`, or `twin` where that is missing or declines, by None.
    """

    @functools.wraps(twin)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if not first.is_cpu or _is_everywhere.get():
            return on_gpu(*args, **kwargs)
        if on_cpu is not None:
            result = on_cpu(*args, **kwargs)
            if result is not None:
                return result
        return twin(*args, **kwargs)

    op.__name__ = op.__qualname__ = twin.__name__.removesuffix("_torch")
    return op


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a Triton kernel; an empty grid runs nothing. All launches go through here.

    `options`: constants of the kernel, and Triton's own, such as num_warps. A product and a sum are
    not fused into one rounding unless they say so, since compilers fuse by the code around them.
    """
    options.setdefault("enable_fp_fusion", False)
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(Launch(kernel, grid, args, options))
    elif 0 not in grid:
        kernel[grid](*args, **options)


@contextlib.contextmanager
def recorded(target: Target) -> Iterator[list[Launch]]:
    """Inside, launches are listed instead of run, and tiles chosen for `target`: works with tensors
    of the device "meta", so without a GPU and without memory.
    """
    launches: list[Launch] = []
    token = _recording.set(_Recording(target, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


@contextlib.contextmanager
def triton_everywhere() -> Iterator[None]:
    """Inside, ops launch their kernels on the CPU too, in Triton's interpreter: whole models can be
    tested so. Triton must have been imported with TRITON_INTERPRET=1.
    """
    token = _is_everywhere.set(True)
    try:
        yield
    finally:
        _is_everywhere.reset(token)


def target_of(x: Tensor) -> Target:
    """The GPU that `x` is on; Triton's interpreter for the CPU."""
    recording = _recording.get()
    if recording is not None:
        return recording.target
    if x.device.type == "cpu":
        return INTERPRETER
    if not HAS_TRITON:
        raise ImportError("CUDA kernels need the package triton: pip install triton")
    return _target_of_device(x.device.index or 0)


@functools.cache
def _target_of_device(index: int) -> Target:
    properties: Any = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        target = TARGETS["gfx942"]
    else:
        target = dataclasses.replace(
            nearest((properties.major, properties.minor)),
            shared_memory=properties.shared_memory_per_block_optin,
        )
    return dataclasses.replace(target, num_processors=properties.multi_processor_count)
