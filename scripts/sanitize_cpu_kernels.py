#!/usr/bin/env python3
"""Watch the CPU kernels for races, bad memory and undefined behaviour.

    scripts/sanitize_cpu_kernels.py [--rounds 200]

Builds the library with each sanitizer and a driver that calls it from two threads at once
(sanitize/stress.cpp), and runs it. Ends with 1 where a sanitizer complains or a result differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from moe_serve.kernels.cpu.build import COMMON, SETS, SOURCES, find_compiler

SANITIZERS = ("thread", "address,undefined")
DRIVER = Path(__file__).parent / "sanitize" / "stress.cpp"


def build(sanitizer: str, folder: Path) -> Path:
    common = [find_compiler(), "-std=c++17", "-O1", "-g", "-w", "-ffp-contract=off", f"-I{SOURCES}"]
    common += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-fno-sanitize=alignment"]
    objects = []
    for name, flags in SETS.items():
        objects.append(str(folder / f"{name}.o"))
        table = f"-DMOE_SERVE_KERNELS=kernels_{name}"
        command = [*common, *flags, table, "-c", str(SOURCES / "kernels.cpp"), "-o", objects[-1]]
        subprocess.run(command, check=True)
    names = [f"-DMOE_SERVE_HAS_{name.upper()}" for name in SETS]
    sources = [str(SOURCES / name) for name in COMMON]
    program = folder / "stress"
    command = [*common, *names, "-pthread", str(DRIVER), *sources, *objects, "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = str(parser.parse_args().rounds)
    failed = 0
    for sanitizer in SANITIZERS:
        with tempfile.TemporaryDirectory() as folder:
            program = build(sanitizer, Path(folder))
            print(f"-fsanitize={sanitizer}", flush=True)
            environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
            failed += subprocess.run([program, rounds], env=environment).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
