"""Compiles the library of CPU kernels, once for each version of its source, into a cache.

And other libraries of ours that need no more than a compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
_COMPILERS = ("g++", "clang++", "c++")
# No product and sum are fused into one rounding but where the source says so.
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-w",
)  # fmt: skip
# Every CPU with AVX2 and FMA has F16C.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
# Instruction set -> what its copy of the kernels is compiled with.
SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, *_AMX, "-DMOE_SERVE_AMX"),
}
# Compiled for any machine.
COMMON = ("library.cpp", "team.cpp")
_MOST_SECONDS = 300


class BuildError(Exception):
    """Why there is no library, in one line."""


def build(*, emulate_amx: bool = False) -> Path:
    """The library's file, compiled unless it is in the cache. Raises `BuildError`.

    A set that the compiler does not know is left out, all but AVX2. Where the cache cannot be
    written, the library is compiled for this process alone. `emulate_amx`: with the tile
    instructions in plain code, to test what surrounds them.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise BuildError(f"there are none for {platform.system()} on {platform.machine()}")
    compiler = find_compiler()
    extra = ("-DMOE_SERVE_EMULATE_AMX",) if emulate_amx else ()
    flags = (*_FLAGS, *extra, *(flag for flags in SETS.values() for flag in flags))
    folder = cache_folder() / _key(compiler, flags, SOURCES)
    return _keep(folder, "libmoe_serve_cpu.so", partial(_compile, compiler, extra))


def build_library(name: str, sources: Path) -> Path:
    """A library of all C++ files of a folder, for any machine of this kind, as `build` makes one.

    Raises `BuildError`.
    """
    if platform.system() != "Linux":
        raise BuildError(f"there is none for {platform.system()}")
    compiler = find_compiler()

    def compile_all(file: Path) -> None:
        _link((compiler, *_FLAGS), sorted(map(str, sources.glob("*.cpp"))), file)

    return _keep(cache_folder() / _key(compiler, _FLAGS, sources), name, compile_all)


def _keep(folder: Path, name: str, compile_to: Callable[[Path], None]) -> Path:
    try:
        return _cached(folder, name, compile_to)
    except OSError as error:
        logger.info("cannot keep %s in %s: %s", name, folder, error.strerror or str(error))
        own = Path(tempfile.mkdtemp(prefix="moe_serve_"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return _cached(own, name, compile_to)


def _cached(folder: Path, name: str, compile_to: Callable[[Path], None]) -> Path:
    file = folder / name
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder / "lock"):
        if not file.exists():
            compile_to(file)
    return file


def find_compiler() -> str:
    """`CXX` if that is set, else the first of the usual ones. Raises `BuildError`."""
    wanted = os.environ.get("CXX", "").split()
    for name in wanted[:1] or _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    names = wanted[0] if wanted else ", ".join(_COMPILERS)
    raise BuildError(f"no C++ compiler found ({names}); install one, for example g++")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moe_serve" / "cpu_kernels"


def _key(compiler: str, flags: Sequence[str], sources: Path) -> str:
    """Of all that the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60).stdout
    digest = hashlib.sha256(version)
    for text in flags:
        digest.update(text.encode() + b"\0")
    for file in sorted(sources.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Ranks start together; one compiles, the others wait."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, extra: Sequence[str], file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:

        def compile_set(name: str) -> str | None:
            table = f"-DMOE_SERVE_KERNELS=kernels_{name}"
            command = [compiler, *_FLAGS, *SETS[name], *extra, table]
            return _run([*command, "-c", str(SOURCES / "kernels.cpp"), "-o", f"{folder}/{name}.o"])

        with ThreadPoolExecutor(len(SETS)) as pool:
            complaints = dict(zip(SETS, pool.map(compile_set, SETS), strict=True))
        if complaints["avx2"] is not None:
            raise BuildError(f"{compiler} fails: {complaints['avx2']}")
        built = [name for name, complaint in complaints.items() if complaint is None]
        files = [*(str(SOURCES / name) for name in COMMON), *(f"{folder}/{n}.o" for n in built)]
        has = (f"-DMOE_SERVE_HAS_{name.upper()}" for name in built)
        _link((compiler, *_FLAGS, *extra, *has), files, file)


def _link(command: Sequence[str], files: Sequence[str], file: Path) -> None:
    """Sources and objects into a library, which is there whole or not at all."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = str(Path(folder, "library.so"))
        complaint = _run([*command, "-shared", "-pthread", *files, "-o", made])
        if complaint is not None:
            raise BuildError(f"{command[0]} fails: {complaint}")
        os.replace(made, file)


def _run(command: Sequence[str]) -> str | None:
    """None, or the first line of the compiler's complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done after {_MOST_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    return (lines or done.stderr.splitlines() or ["no message"])[0].strip()
