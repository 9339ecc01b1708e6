"""What `--eplb-config` may say: how and when experts move between ranks."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from moe_serve.experts.balancing.balance_goal import BalanceGoal

FLAG = "--eplb-config"
# Of whole numbers: far beyond any use, and sums of them fit in 64 bits.
MOST = 2**31 - 1


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
    - `num_nodes`, `num_groups`: see `BalanceGoal`; groups go to nodes in equal numbers.
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
            "log_balancedness_interval": 1, "max_moves": 0, "num_nodes": 1, "num_groups": 1,
            "staging_mib": 1,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= MOST:
                raise ConfigError(f"{FLAG} {name} {value} must be between {low} and {MOST}")
        # Not `< -1 or`: NaN fails every comparison.
        if not -1 <= self.min_gain <= 1:
            raise ConfigError(f"{FLAG} min_gain {self.min_gain} must be between -1 and 1")
        if not 0 < self.transfer_timeout < math.inf:
            raise ConfigError(
                f"{FLAG} transfer_timeout {self.transfer_timeout} must be above 0, and finite"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if self.num_nodes == 1 and self.num_groups > 1:
            raise ConfigError(
                f"{FLAG} num_groups {self.num_groups} has no effect on one node; set num_nodes, or "
                "drop it"
            )
        if self.num_groups % self.num_nodes:
            raise ConfigError(
                f"{FLAG} num_nodes {self.num_nodes} has no effect: num_groups {self.num_groups} "
                "does not divide by it; set num_groups to the model's groups of experts, or drop it"
            )

    def goal(self, max_moves: int | None) -> BalanceGoal:
        """What each placement must keep to. `max_moves`: most slots that may change for it."""
        # Here: the HTTP side, which reads options too, needs no numpy for that.
        from moe_serve.experts.balancing.balance_goal import BalanceGoal

        return BalanceGoal(
            num_nodes=self.num_nodes,
            num_groups=self.num_groups,
            max_moves=max_moves,
            min_replicas=2 if self.cover_rank_loss else 1,
        )

    @classmethod
    def parse(cls, text: str | None) -> EplbConfig:
        """Raises `ConfigError`, naming the key."""
        if text is None:
            return cls()
        try:
            given = json.loads(text)
        except RecursionError:
            raise ConfigError(f"{FLAG} is not usable JSON: nested too deeply") from None
        except ValueError as error:
            raise ConfigError(f"{FLAG} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(f'{FLAG} must be a JSON object, as {{"window_size": 1000}}')
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
