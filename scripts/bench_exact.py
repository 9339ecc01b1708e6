"""What exactness costs: our projection against torch's plain one, side by side.

    .venv/bin/python scripts/bench_exact.py [--threads N] [--pairs N]

Prints a Markdown table: median milliseconds of interleaved pairs, their ratio, and whether the
plain one gives a row of a batch the bits that it has alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from moe_serve.kernels.linear import linear
from moe_serve.parallel.cpu import available_cores

SHAPES = [(256, 512), (1024, 1024), (1024, 4096)]
ROWS = [1, 16, 64, 512, 2048]


def seconds(call: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def is_invariant(x: torch.Tensor, weight: torch.Tensor) -> bool:
    whole = F.linear(x, weight)
    return all(
        torch.equal(F.linear(x[:n], weight), whole[:n]) for n in (1, 2, 3, 7, 16, 33) if n < len(x)
    )


def row(dtype: torch.dtype, shape: tuple[int, int], rows: int, pairs: int) -> str:
    features, out = shape
    x, weight = torch.randn(rows, features).to(dtype), torch.randn(out, features).to(dtype)
    contestants = (lambda: F.linear(x, weight), lambda: linear(x, weight))
    for call in contestants:
        call()
    timed = [[seconds(call) for call in contestants] for _ in range(pairs)]
    plain, ours = (statistics.median(column) * 1e3 for column in zip(*timed, strict=True))
    ratio = statistics.median(pair[1] / pair[0] for pair in timed)
    name = str(dtype).removeprefix("torch.")
    invariant = "yes" if is_invariant(x, weight) else "no"
    cells = [name, f"{features}x{out}", rows, f"{plain:.3f}", f"{ours:.3f}", f"{ratio:.2f}"]
    return " | ".join(["", *map(str, cells), invariant, ""]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--pairs", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| dtype | weight | rows | plain ms | ours ms | ours / plain | plain keeps bits |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            for rows in ROWS:
                print(row(dtype, shape, rows, args.pairs), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
