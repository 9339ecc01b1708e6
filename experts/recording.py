"""What was counted or recorded of expert choices, as plain arrays. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moe_serve.experts.placement import Placement
from moe_serve.experts.step_cost import StepCost

# Shapes: W windows in order of time, C phases, L MoE layers, E logical experts, R ranks, T tokens,
# K top-k.

Ints = npt.NDArray[np.int64]

# A token is of one phase: a prompt's, an output's, or one whose request was preempted and that is
# computed again.
PHASES = ("prefill", "decode", "recomputed")
PREFILL, DECODE, RECOMPUTED = range(len(PHASES))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadRecording:
    """Counts of a stretch of serving, window by window.

    - `counts_WCLE`: how often routers chose each expert.
    - `tokens_WC`: tokens computed, as the scheduler counts them: times `top_k` they are what each
      layer's counts sum to. Where nobody counted them, what the counts make of it, and `has_tokens`
      is False: that they agree proves nothing then.
    - `steps_W`, `seconds_W`: engine steps, and the time they took.
    - `rows_WLR`: rows that each rank's experts computed; R = 0 where that is not known (without
      expert parallelism, or a file that does not tell).
    - `placement` at the end; None where it is not known. `windows_placed`: so many windows, the
      last ones, are under it from their first step; None where experts may have moved meanwhile.
    - `expert_bytes`: weights of one expert of one layer; 0 where that is not known.
    - `cost`: what rows cost on the machine that served; None where it is not known.
    """

    model: str
    top_k: int
    counts_WCLE: Ints
    tokens_WC: Ints
    steps_W: Ints
    seconds_W: npt.NDArray[np.float64]
    rows_WLR: Ints
    placement: Placement | None = None
    windows_placed: int | None = None
    expert_bytes: int = 0
    cost: StepCost | None = None
    has_tokens: bool = True

    def __post_init__(self) -> None:
        windows, phases, layers, _ = self.counts_WCLE.shape
        assert phases == len(PHASES) and self.tokens_WC.shape == (windows, phases)
        assert self.steps_W.shape == self.seconds_W.shape == (windows,)
        assert self.rows_WLR.shape[:2] == (windows, layers)
        assert self.windows_placed is None or 0 <= self.windows_placed <= windows

    @property
    def num_layers(self) -> int:
        return int(self.counts_WCLE.shape[2])

    @property
    def num_experts(self) -> int:
        return int(self.counts_WCLE.shape[3])

    @property
    def num_steps(self) -> int:
        return int(self.steps_W.sum())

    @property
    def counts_LE(self) -> Ints:
        """All windows and phases together: what experts really computed."""
        total: Ints = self.counts_WCLE.sum((0, 1))
        return total

    @property
    def is_conserved(self) -> bool:
        """Whether every token was counted `top_k` times in each layer of each window and phase."""
        sums_WCL = self.counts_WCLE.sum(3)
        return bool((sums_WCL == self.tokens_WC[:, :, None] * self.top_k).all())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteRecording:
    """Which experts each token chose: `ids_TLK`, best first; requests one after another.

    `request_lengths`: tokens of each request, which sum to T. `phases_T`: indices into `PHASES`.
    """

    model: str
    num_experts: int
    ids_TLK: npt.NDArray[np.int16]
    request_lengths: tuple[int, ...]
    phases_T: npt.NDArray[np.int8]

    def __post_init__(self) -> None:
        assert sum(self.request_lengths) == len(self.ids_TLK) == len(self.phases_T)

    @property
    def num_tokens(self) -> int:
        return len(self.ids_TLK)

    @property
    def num_layers(self) -> int:
        return int(self.ids_TLK.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids_TLK.shape[2])

    @property
    def counts_LE(self) -> Ints:
        counts = np.zeros((self.num_layers, self.num_experts), dtype=np.int64)
        for layer, ids_TK in enumerate(self.ids_TLK.swapaxes(0, 1)):
            counts[layer] = np.bincount(ids_TK.ravel(), minlength=self.num_experts)
        return counts
