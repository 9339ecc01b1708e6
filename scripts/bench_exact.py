"""What exactness costs: our projection against torch's plain one, side by side.

    .venv/bin/python scripts/bench_exact.py [--threads N] [--pairs N]

Prints a Markdown table: median milliseconds of interleaved pairs, their ratio, and the row counts
(of those that ours uses) at which the plain one gives a row the bits that other counts give it.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

from moe_serve.bench.ruler import compare
from moe_serve.kernels.linear import TILES, _agrees, linear
from moe_serve.parallel.cpu import available_cores

SHAPES = [(256, 512), (1024, 1024), (1024, 4096)]
ROWS = [1, 16, 64, 512, 2048]


def usable_tiles(weight: torch.Tensor) -> str:
    """Row counts at which plain calls give a row the bits that other batches give it."""
    agreeing = [tile for tile in TILES if _agrees(tile, weight)]
    return "all" if len(agreeing) == len(TILES) else f"not {sorted({*TILES} - {*agreeing})}"


def row(dtype: torch.dtype, shape: tuple[int, int], rows: int, pairs: int) -> str:
    features, out = shape
    x, weight = torch.randn(rows, features).to(dtype), torch.randn(out, features).to(dtype)
    found = compare([lambda: linear(x, weight)], [lambda: F.linear(x, weight)], pairs)
    ours, plain = found.ours.median / 1e3, found.theirs.median / 1e3
    ratio = 1 / found.ratio.median
    name = str(dtype).removeprefix("torch.")
    cells = [name, f"{features}x{out}", rows, f"{plain:.3f}", f"{ours:.3f}", f"{ratio:.2f}"]
    return " | ".join(["", *map(str, cells), usable_tiles(weight), ""]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--pairs", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        "| dtype | weight | rows | plain ms | ours ms | ours / plain | row counts that keep bits |"
    )
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            for rows in ROWS:
                print(row(dtype, shape, rows, args.pairs), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
