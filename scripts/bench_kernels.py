"""Measure our kernels on a GPU, against what it can do and against torch.

    scripts/bench_kernels.py --json results.json [--ops gemm,exact] [--tokens 1,64] [--quick]

Prints Markdown tables, each row when it is there, and keeps the JSON file as complete. One GPU's
copy bandwidth and matrix rate, measured first, are what the shares refer to. `exact` tells whether
rows have the same bits alone and in company, `end_to_end` runs whole steps of a model with random
weights. Ends with 1 where a result is wrong, fails, or has other bits in company.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_bench import end_to_end, run, suite
from kernel_bench.compile import compile_all
from kernel_bench.gemm import forget
from kernel_bench.shapes import QWEN3, TINY

from moe_serve.bench.gpu_ruler import Ceilings


@dataclasses.dataclass
class Report:
    """What is known so far, in the file after each addition."""

    file: Path | None
    found: dict[str, Any]

    def put(self, section: str, record: Any) -> None:
        self.found.setdefault(section, []).append(record)
        self.write()

    def write(self) -> None:
        if self.file is not None:
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(self.found, indent=1))
            part.replace(self.file)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device: nothing can be measured here; --smoke tries the script on the CPU")
        return 2
    if args.compile:
        count = compile_all(functools.partial(all_cases, args), args.compile)
        print(f"{count} launches compiled")
        return 0
    device = torch.device("cpu" if args.smoke else "cuda")
    report = open_report(args, device)
    is_timed = not args.smoke and args.ops != ["exact"]
    ceilings = measure_ceilings(report, device) if is_timed else None
    bench(args, report, device, ceilings)
    if "exact" in args.ops:
        check_bits(args, report, device)
    if "end_to_end" in args.ops:
        run_steps(args, report, device, ceilings)
    return conclude(report)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    known = (*suite.GROUPS, *suite.OTHERS)

    def groups(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; known: {', '.join(known)}")
        return chosen

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write all of it there")
    parser.add_argument("--ops", type=groups, default=list(known), help=",".join(known))
    parser.add_argument("--tokens", type=numbers, help="instead of 1,8,64,512,4096")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, without times")
    parser.add_argument("--compile", type=int, metavar="JOBS", help="fill Triton's cache and end")
    parser.add_argument("--first", type=int, default=0, help="skip cases before this one")
    return parser.parse_args(argv)


def all_cases(args: argparse.Namespace) -> list[Any]:
    return suite.list_cases(args.ops, args.tokens, is_quick=args.quick, is_smoke=args.smoke)


def open_report(args: argparse.Namespace, device: torch.device) -> Report:
    if args.first and args.json is not None and args.json.exists():
        return Report(args.json, json.loads(args.json.read_text()))
    name = "CPU, nothing timed" if args.smoke else torch.cuda.get_device_name(device)
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": shlex.join(sys.argv),
    }
    print(" · ".join(about.values()), flush=True)
    return Report(args.json, {"about": about})


def measure_ceilings(report: Report, device: torch.device) -> Ceilings:
    # A process that goes on after a fault finds them there.
    known = report.found.get("ceilings")
    ceilings = Ceilings(**known) if known else Ceilings.measure(device)
    report.found["ceilings"] = ceilings._asdict()
    print(
        f"copy {ceilings.copy / 1e9:.0f} GB/s read and written, bf16 matmul of "
        f"{ceilings.matmul / 1e12:.0f} TFLOP/s\n"
    )
    return ceilings


def bench(
    args: argparse.Namespace, report: Report, device: torch.device, ceilings: Ceilings | None
) -> None:
    cases = all_cases(args)
    if cases:
        print(run.HEADER)
    budget_us = 10_000.0 if args.quick else 40_000.0
    for index, case in enumerate(cases):
        if index < args.first:
            continue
        row = run.run_case(case, device, ceilings, budget_us)
        print(row.markdown(), flush=True)
        report.put("rows", row.fields())
        if run.is_gpu_lost(device):
            go_on_afterwards(index + 1)
    forget()


def go_on_afterwards(first: int) -> None:
    """In a new process: a kernel that faults takes the GPU from its own for good."""
    print(f"the GPU is lost to this process; case {first} on in a new one", flush=True)
    argv = sys.argv[: sys.argv.index("--first")] if "--first" in sys.argv else sys.argv
    os.execv(sys.executable, [sys.executable, *argv, "--first", str(first)])


def check_bits(args: argparse.Namespace, report: Report, device: torch.device) -> None:
    print("\n| op | shape | rows have the same bits in any company |\n|---|---|---|")
    for case in suite.list_exact(is_smoke=args.smoke):
        found = run.run_exact(case, device)
        answer = {True: "yes", False: "NO"}.get(found["rows_agree"], found["status"])
        print(f"| {case.op} | {case.shape} | {answer} |", flush=True)
        report.put("exact", found)
        if run.is_gpu_lost(device):
            print("the GPU is lost to this process; the rest is not checked")
            return
    forget()


def run_steps(
    args: argparse.Namespace, report: Report, device: torch.device, ceilings: Ceilings | None
) -> None:
    model, loads = QWEN3, end_to_end.QUICK_LOADS if args.quick else end_to_end.LOADS
    if args.smoke:
        model, loads = TINY, end_to_end.TINY_LOADS
    print()
    try:
        for found in end_to_end.measure(model, loads, device, ceilings):
            print(end_to_end.markdown(found), flush=True)
            report.put("end_to_end", found)
    except Exception as error:
        traceback.print_exc()
        report.put("end_to_end", {"what": "failure", "status": run.describe(error)})


def conclude(report: Report) -> int:
    rows, exact = report.found.get("rows", []), report.found.get("exact", [])
    wrong = [row for row in rows if row["status"] != "right"]
    differing = [one for one in exact if one["rows_agree"] is not True]
    print(
        f"\n{len(rows)} cases, {len(wrong)} of them wrong or failed; "
        f"{len(exact)} checks of bits, {len(differing)} of them failed"
    )
    steps = report.found.get("end_to_end", [])
    is_right = not wrong and not differing and all(one["what"] != "failure" for one in steps)
    report.found["is_right"] = is_right
    report.write()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
