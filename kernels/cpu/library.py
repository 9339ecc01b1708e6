"""The compiled CPU kernels: found, loaded, and told which instructions to use."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from moe_serve.kernels.cpu.build import SETS, BuildError, build

logger = logging.getLogger(__name__)

# What `choose` takes besides the names of instruction sets.
AUTO, NONE = "auto", "none"
CHOICES = (AUTO, NONE, *SETS)


class Library:
    """`kernels`: the functions of api.h. `instructions`: the set that they use."""

    def __init__(self, file: Path) -> None:
        self.kernels = ctypes.CDLL(str(file))
        self.instructions = ""
        self.num_threads = 1
        self.kernels.moe_serve_read.restype = ctypes.c_float
        self.kernels.moe_serve_peak.restype = ctypes.c_double
        self.kernels.moe_serve_choose.restype = ctypes.c_char_p
        self.kernels.moe_serve_choose.argtypes = [ctypes.c_char_p]

    def choose(self, name: str) -> bool:
        """Whether this machine has these instructions ("auto": any)."""
        found = self.kernels.moe_serve_choose(b"" if name == AUTO else name.encode())
        if found is not None:
            self.instructions = found.decode()
        return found is not None


_active: Library | None = None


def active() -> Library | None:
    """None: ops on the CPU are their PyTorch twins."""
    return _active


def choose(name: str, num_threads: int) -> bool:
    """From now on, in this process, ops on the CPU use these instructions, "none" or the best.

    False where they cannot: ops are the twins then, and a line in the log says why.
    """
    global _active
    _active = None
    if name == NONE:
        return True
    try:
        library = load()
    except BuildError as error:
        # As text: whoever keeps the record would keep with the error all frames that led here.
        logger.warning("no fast CPU kernels, PyTorch's are used instead: %s", str(error))
        return False
    if not library.choose(name):
        wanted = "AVX2" if name == AUTO else name
        logger.warning("no fast CPU kernels, PyTorch's are used instead: no %s here", wanted)
        return False
    library.num_threads = num_threads
    _active = library
    return True


@functools.cache
def load(*, emulate_amx: bool = False) -> Library:
    """Raises `BuildError`."""
    file = build(emulate_amx=emulate_amx)
    try:
        return Library(file)
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {file}: {error}") from error
