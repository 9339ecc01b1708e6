#!/usr/bin/env python3
"""What serving costs beside the model: host work of a step, CPU time of the HTTP side per token,
the start, and loading weights. Prints Markdown tables of medians.

    .venv/bin/python scripts/bench_overhead.py [--model builtin] [--parts step,http,start,load]
        [--requests 16] [--context 64] [--tries 5]

- step: decode steps of an engine in this process; all but the model's forward and logits.
- http: CPU time of the server process (not the engine's) while that many streams are answered.
- start: from the start of `moe-serve serve MODEL` until /health answers 200.
- load: filling the parameters, against plain reads of the same bytes from the page cache into
  memory that was written to before, and into new memory as parameters are. Wants --model FOLDER;
  needs twice the checkpoint's size in memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from overhead_bench import load_weights, served, steps

PARTS = {
    "step": steps.report,
    "http": served.report_tokens,
    "start": served.report_start,
    "load": load_weights.report,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--parts", default="step,http,start")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of each request")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--tries", type=int, default=5)
    options = parser.parse_args()
    for part in options.parts.split(","):
        print("\n".join(PARTS[part](options)), "\n", sep="", flush=True)


if __name__ == "__main__":
    main()
