"""Where experts lie when the engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_serve.config import EngineConfig, flag
from moe_serve.eplb_config import FLAG
from moe_serve.errors import ConfigError, MoeServeError, PlacementError
from moe_serve.experts.balance import balance
from moe_serve.experts.balancing.balance_goal import BalanceTask
from moe_serve.experts.files.load_files import read_load
from moe_serve.experts.files.placement_files import is_placement, read_placement
from moe_serve.experts.placement import Placement, check_redundant, slots_of_ranks
from moe_serve.experts.recording import Ints
from moe_serve.models.spec import DecoderSpec
from moe_serve.parallel.layout import RankLayout

# Shapes: L MoE layers, E logical experts, P slots of all ranks.


class _Sizes(NamedTuple):
    num_layers: int
    num_experts: int
    num_ranks: int
    top_k: int


def initial_placement(
    config: EngineConfig, spec: DecoderSpec, layout: RankLayout
) -> Placement | None:
    """By `--init-expert-location`, else by strategy; None without expert parallelism.

    With `--enable-eplb` it meets the goal of `--eplb-config`, unless a file says where experts lie:
    then only a later one must be able to. Every rank comes to the same. Raises `ConfigError` for
    what does not fit the model, or can never be.
    """
    if not layout.expert_parallel:
        return None
    sizes = _sizes(spec, layout)
    if config.enable_eplb and sizes.num_ranks == 1:
        raise ConfigError(
            "--enable-eplb: all experts are on one rank, so that none can move; add ranks "
            "(--tensor-parallel-size or --data-parallel-size), or drop it"
        )
    try:
        check_redundant(sizes.num_experts, config.num_redundant_experts, sizes.num_ranks)
        if config.init_expert_location is not None:
            return _read(config, sizes)
        return _by_strategy(config, sizes)
    except MoeServeError as error:
        raise ConfigError(str(error)) from error


def _sizes(spec: DecoderSpec, layout: RankLayout) -> _Sizes:
    counts = {mlp.num_experts for mlp in spec.moe_layers}
    if len(counts) > 1:
        raise ConfigError(
            f"--enable-expert-parallel: layers differ in their experts ({sorted(counts)})"
        )
    top_k = spec.moe_layers[0].router.top_k
    return _Sizes(len(spec.moe_layers), counts.pop(), layout.expert_size, top_k)


def _by_strategy(config: EngineConfig, sizes: _Sizes) -> Placement:
    """Where the strategy's own placement does not meet the goal: an even one that does."""
    strategy, num_redundant = config.expert_placement_strategy, config.num_redundant_experts
    placement = Placement.make(*sizes[:3], strategy, num_redundant)
    one_layer = Placement(placement.layers[:1])
    if not config.enable_eplb or _meets_goal(config, one_layer):
        return placement
    if strategy != "linear":
        name = flag("expert_placement_strategy")
        raise ConfigError(f"{name} {strategy} does not meet the goal of {FLAG}; drop one of them")
    idle_LE = np.zeros((1, sizes.num_experts), dtype=np.int64)
    return Placement(_balanced(config, idle_LE, sizes).layers * sizes.num_layers)


def _read(config: EngineConfig, sizes: _Sizes) -> Placement:
    """From a placement, or by balancing a recorded load."""
    assert config.init_expert_location is not None
    path = Path(config.init_expert_location).expanduser()
    where = f"--init-expert-location {path}"
    num_layers, num_experts, num_ranks, top_k = sizes
    num_redundant = config.num_redundant_experts
    if is_placement(path):
        placement = read_placement(path, num_ranks, num_layers=num_layers, num_experts=num_experts)
        if placement.num_slots != num_experts + num_redundant:
            raise ConfigError(
                f"{where}: {placement.num_slots} slots, but {num_experts} experts and "
                f"{num_redundant} redundant ones make {num_experts + num_redundant}; set "
                f"--ep-num-redundant-experts to {placement.num_slots - num_experts}"
            )
        counts = placement.slots_of_ranks
        if config.enable_eplb:
            if max(counts) - min(counts) > 1:
                raise ConfigError(
                    f"{where}: {list(counts)} slots by rank; with --enable-eplb they may differ by "
                    "one"
                )
            _meets_goal(config, placement)
        return placement
    load_LE = read_load(path, top_k=top_k).counts_LE
    if load_LE.shape != (num_layers, num_experts):
        raise ConfigError(
            f"{where}: a load of {load_LE.shape[0]} layers and {load_LE.shape[1]} experts; the "
            f"model has {num_layers} and {num_experts}"
        )
    if config.enable_eplb:
        _meets_goal(config, Placement.make(1, num_experts, num_ranks, "linear", num_redundant))
    return _balanced(config, load_LE, sizes)


def _meets_goal(config: EngineConfig, placement: Placement) -> bool:
    """In all layers. Raises `ConfigError` where no placement on these ranks can."""
    num_experts, num_slots = placement.num_experts, placement.num_slots
    if config.eplb.cover_rank_loss and num_slots < 2 * num_experts:
        raise ConfigError(
            f"{FLAG} cover_rank_loss: two slots for each of {num_experts} experts are "
            f"{2 * num_experts}, and there are {num_slots}; set num_redundant_experts to "
            f"{num_experts} or more"
        )
    zeros_LE = np.zeros((placement.num_layers, num_experts), dtype=np.int64)
    try:
        task = BalanceTask.of(zeros_LE, placement.slots_of_ranks, config.eplb.goal(None))
    except PlacementError as error:
        raise ConfigError(f"{FLAG}: {error}") from error
    return bool(task.is_met(placement.slots_LP).all())


def _balanced(config: EngineConfig, load_LE: Ints, sizes: _Sizes) -> Placement:
    """For that load, the goal being met. Raises `PlacementError` where it cannot be."""
    num_slots = sizes.num_experts + config.num_redundant_experts
    goal = config.eplb.goal(None)
    return balance(load_LE, slots_of_ranks(num_slots, sizes.num_ranks), goal=goal)
