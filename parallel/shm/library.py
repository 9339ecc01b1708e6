"""The compiled part: native/library.cpp, with its functions' types."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from moe_serve.kernels.cpu.build import BuildError, build_library

SOURCES = Path(__file__).parent / "native"
_INT, _LONG, _WORD = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_NUMBER, _POINTER = ctypes.c_uint32, ctypes.c_void_p
# Name -> (result, arguments).
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "bytes": (_WORD, (_INT, _WORD)),
    "open": (_POINTER, (_INT, _INT, _INT, _WORD, _WORD, _LONG, ctypes.c_char_p)),
    "close": (None, (_POINTER,)),
    "failure": (None, (_POINTER, _POINTER)),
    "all_gather": (_INT, (_POINTER, _POINTER, _POINTER, _WORD)),
    "gather": (_INT, (_POINTER, _POINTER, _POINTER, _WORD)),
    "all_to_all": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "reduce_scatter": (_INT, (_POINTER, _NUMBER, _POINTER, _POINTER, _WORD)),
    "all_reduce": (_INT, (_POINTER, _NUMBER, _POINTER, _WORD)),
    "add": (None, (_NUMBER, _INT, _POINTER, _POINTER, _INT, _WORD)),
}


@functools.cache
def load() -> ctypes.CDLL:
    """Compiled unless it is in the cache. Raises `BuildError`.

    Its functions let other threads of Python run meanwhile.
    """
    file = build_library("libmoe_serve_shm.so", SOURCES)
    try:
        library = ctypes.CDLL(str(file))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"moe_serve_shm_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {file}: {error}") from error
    return library
