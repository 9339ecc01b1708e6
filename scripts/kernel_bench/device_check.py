"""Everything that only a GPU can tell, in under eight minutes: what `scripts/gpu_check` runs.

    scripts/gpu_check [--quick]

Results and logs go to $OUT, else to build/gpu_check. Each part has a time limit, and what it found
until then counts. Ends with 1 where something is wrong or unproven, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = "scripts/bench_kernels.py"
TIMED = "gemm,attention,routing,rows,sampling"
_MOST_LINES = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`must_pass`: whether it proves something right, and not only measures."""

    name: str
    arguments: list[str]
    limit: float
    must_pass: bool = True


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    part: Part
    log: Path
    process: subprocess.Popen[bytes]
    began: float
    seconds: float = 0.0
    status: str = ""

    @property
    def is_good(self) -> bool:
        return self.status == "passed" or not self.part.must_pass


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to check here")
        return 2
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu_check")
    out.mkdir(parents=True, exist_ok=True)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; results in {out}", flush=True
    )
    return check(phases(out, is_quick=args.quick), out)


def phases(out: Path, *, is_quick: bool) -> list[list[Part]]:
    """Parts of one phase run side by side. What measures time runs alone."""
    quick = ["--quick"] * is_quick
    # Compiling takes longer than testing: on many cores it is quicker to share.
    jobs = max(1, min(8, len(os.sched_getaffinity(0)) // 3))
    return [
        [
            Part(name="tests", arguments=pytest_arguments(jobs), limit=150),
            Part(name="model", arguments=["scripts/kernel_bench/model_check.py"], limit=150),
            bench_part(out, "exact", "exact", 150, []),
            Part(
                name="compile",
                arguments=[BENCH, "--ops", TIMED, "--compile", str(jobs), *quick],
                limit=150,
                must_pass=False,
            ),
        ],
        [bench_part(out, "kernels", TIMED, 190, quick)],
        [bench_part(out, "end_to_end", "end_to_end", 110, quick)],
    ]


def bench_part(out: Path, name: str, ops: str, limit: float, quick: list[str]) -> Part:
    file = str(out / f"{name}.json")
    return Part(name=name, arguments=[BENCH, "--ops", ops, "--json", file, *quick], limit=limit)


def pytest_arguments(jobs: int) -> list[str]:
    # Plugins and versions of this machine are not ours: their warnings are not our errors.
    arguments = ["-m", "pytest", "tests/kernels", "-q", "-rfE", "-W", "default"]
    arguments += ["-p", "pytest_timeout", "-p", "no:cacheprovider"]
    # Compiles for GPUs that are elsewhere.
    arguments += ["--ignore", "tests/kernels/test_kernel_report.py"]
    if importlib.util.find_spec("xdist") is not None:
        arguments += ["-p", "xdist.plugin", "-n", str(jobs)]
    return arguments


def check(parts: list[list[Part]], out: Path) -> int:
    runs = [run for phase in parts for run in run_phase(phase, out)]
    found: dict[str, Any] = {run.part.name: take(out / f"{run.part.name}.json") for run in runs}
    found["parts"] = {
        run.part.name: {"status": run.status, "seconds": round(run.seconds, 1)} for run in runs
    }
    (out / "results.json").write_text(json.dumps(found, indent=1))
    for run in runs:
        print(f"\n== {run.part.name}: {run.status} after {run.seconds:.0f} s")
        print("\n".join(worth_telling(run)))
    is_good = all(run.is_good for run in runs)
    print(f"\n{'all is right' if is_good else 'NOT RIGHT, or not proven'}: {out / 'results.json'}")
    return 0 if is_good else 1


def run_phase(parts: list[Part], out: Path) -> list[Run]:
    runs = [start(part, out) for part in parts]
    for run in runs:
        wait(run)
        print(f"{run.part.name}: {run.status} after {run.seconds:.0f} s", flush=True)
    return runs


def start(part: Part, out: Path) -> Run:
    log = out / f"{part.name}.log"
    # Nothing of an earlier check may stand for this one.
    (out / f"{part.name}.json").unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(part=part, log=log, process=process, began=time.monotonic())


def wait(run: Run) -> None:
    """Until it ends, or is ended with all that it started."""
    left = run.part.limit - (time.monotonic() - run.began)
    try:
        code = run.process.wait(max(0.0, left))
        run.status = "passed" if code == 0 else f"FAILED with {code}"
    except subprocess.TimeoutExpired:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        run.status = f"ENDED at its limit of {run.part.limit:.0f} s"
    run.seconds = time.monotonic() - run.began


def take(file: Path) -> Any:
    """What a part wrote; it is kept with all the rest, in one file."""
    file.with_suffix(".part").unlink(missing_ok=True)
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    file.unlink()
    return found


def worth_telling(run: Run) -> list[str]:
    """The last lines of a log; of tests and models what failed, of tables all that is not right."""
    lines = run.log.read_text(errors="replace").splitlines()
    if run.part.name == "tests":
        lines = [line for line in lines if re.match(r"(FAILED|ERROR|E  )", line)] + lines[-1:]
    elif run.part.name == "model":
        lines = [line for line in lines if not line.startswith("yes")]
    elif run.part.name in ("kernels", "exact"):
        lines = [line for line in lines if re.search(r"wrong|failed|NO \||lost", line)]
    return [line[:300] for line in lines[-_MOST_LINES:]]


if __name__ == "__main__":
    sys.exit(main())
