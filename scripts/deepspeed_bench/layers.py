"""One MoE layer: DeepSpeed's `MoE` and ours, with the same weights, tokens and ranks."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F

from moe_serve.bench.rank_ruler import slowest_milliseconds
from moe_serve.bench.table import Table
from moe_serve.config import CommBackend
from moe_serve.kernels.cpu import library
from moe_serve.layers.moe import MoE
from moe_serve.models.packing import pack_weights
from moe_serve.models.shard import ModelShard
from moe_serve.models.spec import MoESpec
from moe_serve.parallel.comm_backend import make_collectives
from moe_serve.parallel.deepspeed_collectives import DeepSpeedCollectives
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.layout import RankLayout
from moe_serve.ranks import Ranks
from moe_serve.routing.router import RouterSpec

# Shapes: T tokens of a rank, D model, F inner, E experts, G 2 F.

TIMEOUT = 120.0
CPU = torch.device("cpu")
COLUMNS = ("dtype", "EP", "tokens a rank", "DeepSpeed ms", "ours ms (by gloo)", "ours by shm ms",
           "DeepSpeed / best of ours", "largest difference")  # fmt: skip


class Weights:
    """All experts', made anew from a seed at every rank, rounded to the dtype."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=rng) * shape[-1] ** -0.5).to(dtype)

        experts, hidden, inner = options.experts, options.hidden, options.inner
        self.router_ED = normal(experts, hidden)
        self.gate_up_EGD = normal(experts, 2 * inner, hidden)
        self.down_EDF = normal(experts, hidden, inner)


class Expert(nn.Module):
    """A gated MLP, as a user of DeepSpeed would write it."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def make_theirs(options: argparse.Namespace, weights: Weights) -> nn.Module:
    from deepspeed.moe.layer import MoE as TheirMoE

    size, rank = dist.get_world_size(), dist.get_rank()
    layer = TheirMoE(
        options.hidden, Expert(options.hidden, options.inner), options.experts, ep_size=size,
        k=options.top_k, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    # It prints that there is no group yet.
    with contextlib.redirect_stdout(io.StringIO()):
        layer.set_deepspeed_parallelism()
    layer = layer.to(weights.router_ED.dtype).eval()
    moe = layer.deepspeed_moe
    moe.gate.wg.weight.copy_(weights.router_ED)
    for index, expert in enumerate(moe.experts.deepspeed_experts, rank * layer.num_local_experts):
        gate, up = weights.gate_up_EGD[index].chunk(2)
        for linear, value in ((expert.gate, gate), (expert.up, up)):
            linear.weight.copy_(value)
        expert.down.weight.copy_(weights.down_EDF[index])
    found: nn.Module = layer
    return found


def make_ours(options: argparse.Namespace, weights: Weights, group: RankGroup | None) -> Any:
    """[T, D] -> [T, D]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks()
    if group is not None:
        layout = RankLayout(rank=rank, data_size=size, expert_parallel=True)
        ranks = Ranks(shard=ModelShard(layout=layout), experts=group)
    spec = MoESpec(
        num_experts=options.experts,
        inner_size=options.inner,
        router=RouterSpec(top_k=options.top_k),
    )
    layer = MoE(spec, options.hidden, 0, ranks, dtype=weights.down_EDF.dtype, device=CPU)
    own = list(ranks.shard.experts(0, options.experts))
    layer.router.weight_ED.copy_(weights.router_ED)
    layer.experts.gate_up_EGD.copy_(weights.gate_up_EGD[own])
    layer.experts.down_EDF.copy_(weights.down_EDF[own])
    active = library.active()
    if active is not None:
        pack_weights(layer, active)

    def run(x_TD: Tensor) -> Tensor:
        result: Tensor = layer(x_TD, ranks.step([len(x_TD)] * size), None)
        return result

    return run


def measure(options: argparse.Namespace, groups: dict[str, RankGroup | None]) -> list[list[str]]:
    """The lines of all settings, the same on every rank."""
    lines = []
    for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
        weights = Weights(options, dtype)
        theirs = make_theirs(options, weights)
        ours = {name: make_ours(options, weights, group) for name, group in groups.items()}
        for num_tokens in map(int, options.tokens.split(",")):
            rng = torch.Generator().manual_seed(1 + dist.get_rank())
            x_TD = torch.randn(num_tokens, options.hidden, generator=rng).to(dtype)
            calls: list[Callable[[], Tensor]] = [
                lambda x_TD=x_TD, run=theirs: run(x_TD)[0],
                *(lambda x_TD=x_TD, run=run: run(x_TD) for run in ours.values()),
            ]
            lines.append(
                [str(dtype)[6:], str(dist.get_world_size()), str(num_tokens)]
                + cells(calls, list(ours), options.rounds)
            )
    return lines


def cells(calls: Sequence[Callable[[], Tensor]], names: list[str], rounds: int) -> list[str]:
    expected, *found = (copy.deepcopy(call()).float() for call in calls)
    off = max(float((one - expected).abs().max()) for one in found)
    times = [statistics.median(row.tolist()) for row in slowest_milliseconds(calls, rounds)]
    best = min(times[1:])
    by_name = dict(zip(names, times[1:], strict=True))
    own = [by_name.get("alone", by_name.get("gloo")), by_name.get("shm")]
    return [
        f"{times[0]:.2f}",
        *("-" if value is None else f"{value:.2f}" for value in own),
        f"{times[0] / best:.2f}",
        f"{off:.1e} of {float(expected.abs().max()):.1e}",
    ]


def run_rank(rank: int, options: argparse.Namespace, size: int, store: str) -> None:
    threads = max(1, options.cores // size)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    world = dist.group.WORLD
    assert world is not None
    # Opens deepspeed.comm without its op for shared memory, which no MoE layer uses.
    DeepSpeedCollectives(world)
    library.choose(library.AUTO, threads)
    groups: dict[str, RankGroup | None] = {"alone": None}
    if size > 1:
        names: tuple[CommBackend, ...] = ("gloo", "shm")
        made = [make_collectives(name, world, [""] * size, TIMEOUT, "cpu")[0] for name in names]
        groups = {kind.name: RankGroup(kind) for kind in made}
    with torch.no_grad():
        lines = measure(options, groups)
    if rank == 0:
        table = Table(COLUMNS)
        for cells_of_line in lines:
            table.add(*cells_of_line)
        print(table, "\n", flush=True)
    for group in groups.values():
        if group is not None:
            group.close()
    dist.destroy_process_group()


def report(options: argparse.Namespace) -> None:
    print(f"MoE layer: {options.experts} experts of {options.inner}, hidden {options.hidden}, top "
          f"{options.top_k}, {options.cores} threads in all\n")  # fmt: skip
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(run_rank, (options, size, f"{folder}/store"), nprocs=size)
