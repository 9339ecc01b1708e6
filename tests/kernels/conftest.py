"""Kernels run on the GPU where there is one, else in Triton's interpreter: tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_serve.kernels.cpu import library
from moe_serve.kernels.cpu.build import SETS, BuildError
from moe_serve.kernels.cpu.library import Library

EMULATED = "amx, emulated"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[*SETS, EMULATED])
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The CPU kernels with each instruction set in turn, on two threads.

    Skips those that this machine or its compiler lacks.
    """
    name, before = request.param, library.active()
    try:
        found = library.load(emulate_amx=name == EMULATED)
        if not found.choose("amx" if name == EMULATED else name):
            pytest.skip(f"no {name} here")
        found.num_threads = 2
        library._active = found
        yield found
    except BuildError as error:
        pytest.skip(str(error))
    finally:
        library._active = before
