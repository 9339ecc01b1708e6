#!/usr/bin/env python3
"""Our MoE layer and our decode step beside DeepSpeed's, on the same weights, ranks and machine.

    .venv/bin/python scripts/bench_deepspeed.py [--parts layers,decode] [--rounds 15] ...

- layers: `deepspeed.moe.layer.MoE` (no token dropped, no second expert sampled), its experts gated
  MLPs of torch's, with EP 1 and 2 over gloo, against our layer by gloo and by shared memory. Times
  are the slowest rank's; results are compared first.
- decode: a step of a batch by `deepspeed.init_inference`, as far as it supports the model, against
  a step of our engine, scheduler and sampling included; with 1 rank, and with 2 that share tokens.
  What DeepSpeed answered stands below where it gave no time.
- shm: DeepSpeed's all-reduce in shared memory: where it is right, and how long it takes.

Both sides have as many threads in all as there are cores. Medians of interleaved rounds.
Needs DeepSpeed: pip install 'moe-serve[deepspeed]'.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed_bench import decode, layers, shared_memory

from moe_serve.bench.processor import processor_name

PARTS = {"layers": layers.report, "decode": decode.report, "shm": shared_memory.report}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="layers,decode,shm")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", default="1,8,64,512", help="of a rank, for layers")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="of the model, for decode")
    parser.add_argument("--batches", default="1,8", help="sequences, for decode")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16, help="of a round, for decode")
    parser.add_argument(
        "--injects", action="store_true", help="ask DeepSpeed for its kernels, for decode"
    )
    options = parser.parse_args()
    options.cores = len(os.sched_getaffinity(0))
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("deepspeed", "torch", "transformers")
    )
    print(f"{datetime.date.today()} · {processor_name()}, {options.cores} cores · Python "
          f"{platform.python_version()}, {versions} · "
          f"`{shlex.join(['python', *sys.argv])}`\n", flush=True)  # fmt: skip
    warnings.simplefilter("ignore", FutureWarning)
    for part in options.parts.split(","):
        PARTS[part](options)


if __name__ == "__main__":
    main()
