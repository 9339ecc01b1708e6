"""What `--eplb-config` may say: how and when experts move between ranks."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from typing import Any, Literal

from moe_serve.errors import ConfigError

FLAG = "--eplb-config"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """vLLM's keys and defaults, then our own.

    - `window_size`: engine steps whose load counts.
    - `step_interval`: steps between two rebalances; 0: only when asked by HTTP.
    - `num_redundant_experts`: slots for copies, over all ranks, in each layer.
    - `use_async`: copy weights while steps go on; otherwise steps wait.
    - `policy`: "default", the balancer of `experts.balance`.
    - `log_balancedness`, and every how many collections of the load.
    - `max_moves`: most slots, over all layers, that one rebalance may change; null: no limit.
    - `min_gain`: a rebalance is done only where it is expected to add more than this to the
      balancedness, mean over layers; -1: always.
    - `num_nodes`, `num_groups`: see `BalanceGoal`.
    - `cover_rank_loss`: every expert on two ranks at least.
    - `transfer_timeout`: seconds that moving the weights may take; then all stays as it was.
    - `staging_mib`: host memory of a rank for weights on their way; larger moves go in parts.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    use_async: bool = True
    policy: Literal["default"] = "default"
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    max_moves: int | None = None
    min_gain: float = 0.0
    num_nodes: int = 1
    num_groups: int = 1
    cover_rank_loss: bool = False
    transfer_timeout: float = 60.0
    staging_mib: int = 1024

    def __post_init__(self) -> None:
        least = {
            "window_size": 1, "step_interval": 0, "num_redundant_experts": 0,
            "log_balancedness_interval": 1, "max_moves": 0, "min_gain": -1.0, "num_nodes": 1,
            "num_groups": 1, "staging_mib": 1,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            # Not `< low`: NaN fails every comparison.
            if value is not None and not value >= low:
                raise ConfigError(f"{FLAG} {name} {value} must be at least {low}")
        if not self.transfer_timeout > 0:
            raise ConfigError(f"{FLAG} transfer_timeout {self.transfer_timeout} must be above 0")

    @classmethod
    def parse(cls, text: str | None) -> EplbConfig:
        """Raises `ConfigError`, naming the key."""
        if text is None:
            return cls()
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{FLAG} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"{FLAG} must be a JSON object, not {text}")
        kinds = typing.get_type_hints(cls)
        for name, value in given.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(kinds)}"
                raise ConfigError(f"{FLAG} has no key {name!r}{hint}")
            _check_kind(name, value, kinds[name])
        return cls(**given)


def _check_kind(name: str, value: Any, kind: Any) -> None:
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            wanted = ", ".join(map(repr, typing.get_args(kind)))
            raise ConfigError(f"{FLAG} {name} {value!r} must be one of {wanted}")
        return
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    # In Python a bool is an int, and an int will do for a float.
    fits = type(value) in allowed or (float in allowed and type(value) is int)
    if not fits:
        wanted = " or ".join(getattr(k, "__name__", str(k)) for k in allowed)
        raise ConfigError(f"{FLAG} {name} {value!r} must be {wanted}")
