"""Where experts lie when the engine starts."""

from __future__ import annotations

from pathlib import Path

from moe_serve.config import EngineConfig
from moe_serve.errors import ConfigError, MoeServeError
from moe_serve.experts.placement import Placement, check_redundant, slots_of_ranks
from moe_serve.models.spec import DecoderSpec
from moe_serve.parallel.layout import RankLayout


def initial_placement(
    config: EngineConfig, spec: DecoderSpec, layout: RankLayout
) -> Placement | None:
    """By `--init-expert-location`, else by strategy; None without expert parallelism.

    Every rank comes to the same. Raises `ConfigError` for what does not fit the model.
    """
    if not layout.expert_parallel:
        return None
    counts = {mlp.num_experts for mlp in spec.moe_layers}
    if len(counts) > 1:
        raise ConfigError(
            f"--enable-expert-parallel: layers differ in their experts ({sorted(counts)})"
        )
    num_layers, num_experts, num_ranks = len(spec.moe_layers), counts.pop(), layout.expert_size
    try:
        check_redundant(num_experts, config.num_redundant_experts, num_ranks)
        if config.init_expert_location is not None:
            return _read(config, num_layers, num_experts, num_ranks)
    except MoeServeError as error:
        raise ConfigError(str(error)) from error
    return Placement.make(
        num_layers,
        num_experts,
        num_ranks,
        config.expert_placement_strategy,
        config.num_redundant_experts,
    )


def _read(config: EngineConfig, num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """From a placement, or by balancing a recorded load."""
    from moe_serve.experts.balance import balance
    from moe_serve.experts.load_files import read_load
    from moe_serve.experts.placement_files import is_placement, read_placement

    assert config.init_expert_location is not None
    path = Path(config.init_expert_location).expanduser()
    num_slots = num_experts + config.num_redundant_experts
    if is_placement(path):
        placement = read_placement(path, num_ranks, num_layers=num_layers, num_experts=num_experts)
        if placement.num_slots != num_slots:
            raise ConfigError(
                f"--init-expert-location {path}: {placement.num_slots} slots, but {num_experts} "
                f"experts and {config.num_redundant_experts} redundant ones make {num_slots}; set "
                f"num_redundant_experts to {placement.num_slots - num_experts}"
            )
        return placement
    load_LE = read_load(path).counts_LE
    if load_LE.shape != (num_layers, num_experts):
        raise ConfigError(
            f"--init-expert-location {path}: a load of {load_LE.shape[0]} layers and "
            f"{load_LE.shape[1]} experts; the model has {num_layers} and {num_experts}"
        )
    return balance(load_LE, slots_of_ranks(num_slots, num_ranks))
