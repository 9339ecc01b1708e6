"""The router: everything in which families differ, as data."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from torch import Tensor

from moe_serve.kernels.topk_router import topk_router

# Shapes: T tokens, E experts, K top-k, C phases.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """See `kernels.topk_router` for what each field does."""

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


class Routing(NamedTuple):
    """Where each token goes: `ids_TK` int64 logical experts, `weights_TK` fp32.

    Padding goes nowhere: ids -1, weights 0.
    """

    ids_TK: Tensor
    weights_TK: Tensor


def route(
    logits_TE: Tensor,
    spec: RouterSpec,
    correction_bias_E: Tensor | None = None,
    *,
    load_CE: Tensor | None = None,
    phases_T: Tensor | None = None,
    num_valid_1: Tensor | None = None,
) -> Routing:
    """Choose the experts of each token. Logits are taken to fp32 before anything else.

    `load_CE` counts the choices, by the phase of each token; `num_valid_1`: see `StepContext`.
    """
    ids_TK, weights_TK = topk_router(
        logits_TE,
        spec.top_k,
        score=spec.score,
        renormalize=spec.renormalize,
        scale=spec.scale,
        correction_bias_E=correction_bias_E,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        load_CE=load_CE,
        phases_T=phases_T,
        num_valid_1=num_valid_1,
    )
    return Routing(ids_TK, weights_TK)
