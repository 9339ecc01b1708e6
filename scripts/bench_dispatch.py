"""What it costs to bring tokens to experts on other ranks: bytes and time, side by side.

    .venv/bin/python scripts/bench_dispatch.py [--ranks 2,4] [--tokens 1,16,256] [--skew 0,1] ...

Starts ranks on this machine, one thread each; `--comm-backend` says how they exchange tensors,
and (auto) marks what `auto` takes. Bytes are per token, times per layer:

- sent: bytes that left a rank for another. bound: each token's row once to every other rank with
  one of its experts, and one result row back for each (token, slot) computed elsewhere: what must
  move if the home rank adds. bound if ranks add: one row back for each such rank instead, which
  would make a token's bits depend on the placement.
- exchange: dispatch and combine; layer: with the experts between. Medians of interleaved rounds,
  first and third quartile in brackets, of the slowest rank of each round.

`torch` is the baseline: torch's own all-gather of rows, weights and ids, and its own reduce-scatter
of each rank's part of the sum, in the model's dtype. Its bits depend on the placement.
An all-to-all padded to equal parts sends what `allgather_reducescatter` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from moe_serve.bench.processor import processor_name
from moe_serve.bench.rank_ruler import slowest_milliseconds
from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.placement import Placement
from moe_serve.kernels.permute import permute
from moe_serve.parallel.comm_backend import make_collectives
from moe_serve.parallel.group import RankGroup
from moe_serve.routing.all_gather import AllGatherDispatcher
from moe_serve.routing.all_to_all import AllToAllDispatcher
from moe_serve.routing.dispatch import Dispatched, Dispatcher
from moe_serve.routing.expert_map import ExpertMap, ReplicaTurns
from moe_serve.routing.packing import pack, unpack
from moe_serve.routing.router import Routing
from moe_serve.routing.traffic import prefers_static

# Shapes: T tokens of a rank, D model, K top-k, E experts, S ranks, N tokens of all ranks, R rows.

COLUMNS = (
    "ranks", "skew", "tokens a rank", "path", "sent B", "bound B", "sent / bound",
    "bound B if ranks add", "exchange ms", "layer ms",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """`skew`: expert i is wanted in proportion to (i + 1) ** -skew."""

    num_ranks: int
    num_tokens: int
    skew: float
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    dtype: str
    rounds: int

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.torch_dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bytes that must leave this rank's tokens for other ranks and come back to them."""

    home_adds: int
    ranks_add: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchDispatched(Dispatched):
    token_R: Tensor
    weights_R: Tensor
    num_tokens: int


class TorchDispatcher:
    """The baseline. It adds a token's results where they are computed."""

    def __init__(self, group: RankGroup, experts: ExpertMap) -> None:
        self.group = group
        self.num_local = experts.num_local[group.rank]
        physical_E = experts.replicas_EC[:, 0]
        is_own_E = experts.rank_of(physical_E) == group.rank
        self.index_of_E = experts.index_of(physical_E).where(is_own_E, -1)

    def dispatch(self, x_TD: Tensor, routing: Routing, capacity: int) -> TorchDispatched:
        parts = (x_TD, routing.weights_TK, routing.ids_TK.to(torch.int16))
        packed = pack(*parts)
        gathered = packed.new_empty((self.group.size * len(packed), packed.shape[1]))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, packed)
        sent = packed.nbytes * (self.group.size - 1)
        self.group.log.note("all_gather", packed.nbytes, sent, None)
        x_ND, weights_NK, ids_NK = unpack(gathered, *((p.shape[1], p.dtype) for p in parts))
        permutation = permute(self.index_of_E[ids_NK.long()], self.num_local)
        order_R = permutation.order_R[: int(permutation.counts_E.sum())]
        token_R = order_R // ids_NK.shape[1]
        return TorchDispatched(
            rows_RD=x_ND.index_select(0, token_R),
            counts_E=permutation.counts_E,
            token_R=token_R,
            weights_R=weights_NK.flatten()[order_R],
            num_tokens=len(x_ND),
        )

    def combine(self, rows_RD: Tensor, dispatched: TorchDispatched) -> Tensor:
        part_ND = torch.zeros(dispatched.num_tokens, rows_RD.shape[1])
        weighted_RD = rows_RD.float() * dispatched.weights_R[:, None]
        part_ND = part_ND.index_add_(0, dispatched.token_R, weighted_RD).to(rows_RD.dtype)
        out_TD = part_ND.new_empty((len(part_ND) // self.group.size, rows_RD.shape[1]))
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out_TD, part_ND)
        sent = out_TD.nbytes * (self.group.size - 1)
        self.group.log.note("reduce_scatter", part_ND.nbytes, sent, None)
        return out_TD


@dataclasses.dataclass(frozen=True)
class Path:
    name: str
    dispatcher: Dispatcher[Any]


def tokens_of(setting: Setting, rank: int) -> tuple[Tensor, Routing]:
    rng = torch.Generator().manual_seed(rank)
    shape = (setting.num_tokens, setting.num_experts)
    popularity_E = -setting.skew * torch.arange(1, setting.num_experts + 1).float().log()
    gumbel_TE = -torch.rand(shape, generator=rng).log().neg().log()
    chosen = (popularity_E + gumbel_TE).topk(setting.top_k)
    x_TD = torch.randn(setting.num_tokens, setting.hidden, generator=rng)
    return x_TD.to(setting.torch_dtype), Routing(chosen.indices, chosen.values.softmax(-1))


def bounds(setting: Setting, ranks_TK: Tensor, rank: int) -> Bounds:
    others = [other for other in range(setting.num_ranks) if other != rank]
    pairs = sum(int((ranks_TK == other).any(1).sum()) for other in others)
    slots = int((ranks_TK != rank).sum())
    return Bounds(
        home_adds=(pairs + slots) * setting.row_bytes, ranks_add=2 * pairs * setting.row_bytes
    )


def own_bank(setting: Setting, num_local: int) -> ExpertBank:
    cpu = torch.device("cpu")
    bank = ExpertBank(num_local, setting.hidden, setting.inner, "silu", setting.torch_dtype, cpu)
    for parameter in bank.parameters():
        parameter.copy_(torch.randn(parameter.shape) * parameter.shape[2] ** -0.5)
    return bank


def measure(group: RankGroup, setting: Setting) -> list[str]:
    """The lines of one setting, the same on every rank."""
    placement = Placement.make(1, setting.num_experts, group.size)
    experts = ExpertMap.make(placement.layers[0].experts, group.rank)
    bank = own_bank(setting, experts.num_local[group.rank])
    x_TD, routing = tokens_of(setting, group.rank)
    paths = [
        Path("torch", TorchDispatcher(group, experts)),
        Path("allgather_reducescatter", AllGatherDispatcher(group, ReplicaTurns(experts))),
        Path("all_to_all", AllToAllDispatcher(group, ReplicaTurns(experts))),
    ]

    def exchange(path: Path, with_experts: bool) -> Callable[[], Tensor]:
        def call() -> Tensor:
            dispatched = path.dispatcher.dispatch(x_TD, routing, setting.num_tokens)
            rows_RD = dispatched.rows_RD
            results = bank(rows_RD, dispatched.counts_E) if with_experts else rows_RD
            return path.dispatcher.combine(results, dispatched)

        return call

    sent = [bytes_of(group, exchange(path, False)) for path in paths]
    calls = [exchange(path, with_experts) for path in paths for with_experts in (False, True)]
    times = medians(calls, setting.rounds)
    found = bounds(setting, experts.rank_of(experts.choose(routing.ids_TK, 0)), group.rank)
    needed = Bounds(home_adds=total(found.home_adds), ranks_add=total(found.ranks_add))
    return [
        line(*cells(setting, path.name, sent[i], needed), *times[2 * i : 2 * i + 2])
        for i, path in enumerate(paths)
    ]


def cells(setting: Setting, name: str, sent: int, needed: Bounds) -> list[object]:
    num_tokens = setting.num_tokens * setting.num_ranks
    takes_static = prefers_static(
        setting.num_tokens, setting.num_ranks, setting.top_k, setting.row_bytes
    )
    chosen = "allgather_reducescatter" if takes_static else "all_to_all"
    return [
        setting.num_ranks,
        f"{setting.skew:g}",
        setting.num_tokens,
        name + (" (auto)" if name == chosen else ""),
        f"{sent / num_tokens:.0f}",
        f"{needed.home_adds / num_tokens:.0f}",
        f"{sent / needed.home_adds:.2f}" if needed.home_adds else "-",
        f"{needed.ranks_add / num_tokens:.0f}",
    ]


def bytes_of(group: RankGroup, call: Callable[[], Tensor]) -> int:
    """What all ranks send in one call."""
    before = group.bytes_sent
    call()
    return total(group.bytes_sent - before)


def total(count: int) -> int:
    summed = torch.tensor(count)
    dist.all_reduce(summed)
    return int(summed)


def medians(calls: Sequence[Callable[[], Tensor]], rounds: int) -> list[str]:
    """Milliseconds of each call."""
    times = slowest_milliseconds(calls, rounds)
    quartiles = [statistics.quantiles(row.tolist(), n=4) for row in times]
    return [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for low, middle, high in quartiles]


def line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def run_rank(rank: int, settings: Sequence[Setting], store: str, backend: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=settings[0].num_ranks
    )
    hosts = ["here"] * settings[0].num_ranks
    collectives, obstacle = make_collectives(backend, dist.group.WORLD, hosts, 60.0, "cpu")
    assert obstacle is None, obstacle
    group = RankGroup(collectives)
    with torch.inference_mode():
        for setting in settings:
            lines = measure(group, setting)
            if rank == 0:
                print("\n".join(lines), flush=True)
    dist.destroy_process_group()


def settings_of(args: argparse.Namespace, num_ranks: int) -> Iterator[Setting]:
    for skew, num_tokens in itertools.product(args.skew, args.tokens):
        yield Setting(
            num_ranks=num_ranks, num_tokens=num_tokens, skew=skew, hidden=args.hidden,
            inner=args.inner, num_experts=args.experts, top_k=args.top_k, dtype=args.dtype,
            rounds=args.rounds,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 256], help="of each rank")
    parser.add_argument(
        "--skew", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 1.0]
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--comm-backend", choices=["gloo", "shm"], default="shm")
    args = parser.parse_args()
    print(f"{datetime.date.today()} · {processor_name()}, {os.cpu_count()} cores · Python "
          f"{platform.python_version()}, torch {torch.__version__}, {args.comm_backend}, "
          f"one thread a rank · `{shlex.join(['python', *sys.argv])}`\n")  # fmt: skip
    print(line(*COLUMNS))
    print("|" + "---|" * len(COLUMNS), flush=True)
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            store = f"{folder}/store"
            run = list(settings_of(args, num_ranks)), store, args.comm_backend
            multiprocessing.spawn(run_rank, args=run, nprocs=num_ranks)


if __name__ == "__main__":
    main()
