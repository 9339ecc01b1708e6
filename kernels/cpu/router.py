"""The router's top-k. Declines, by None, what it has no kernel for."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.cpu.calls import RouterCall, address, call
from moe_serve.kernels.cpu.library import active

# Shapes: T tokens, E experts, K top-k, C phases.

# As in native/rows.h: a token's scores stand on the stack.
_MOST_EXPERTS = 1024


def topk_router_cpu(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: str,
    renormalize: bool,
    scale: float = 1.0,
    correction_bias_E: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    load_CE: Tensor | None = None,
    phases_T: Tensor | None = None,
    num_valid_1: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    library = active()
    (num_tokens, num_experts), dtype = logits_TE.shape, logits_TE.dtype
    if (
        library is None
        or num_experts > _MOST_EXPERTS
        or dtype != torch.float32
        or score not in ("softmax", "sigmoid")
        or num_experts % num_groups
    ):
        return None
    logits_TE = logits_TE.contiguous()
    bias_E = None if correction_bias_E is None else correction_bias_E.float().contiguous()
    assert load_CE is None or (load_CE.is_contiguous() and load_CE.dtype == torch.int64)
    assert phases_T is None or (phases_T.is_contiguous() and phases_T.dtype == torch.int32)
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64)
    weights_TK = torch.empty(num_tokens, top_k)
    arguments = RouterCall(
        logits_TE.data_ptr(), address(bias_E), ids_TK.data_ptr(), weights_TK.data_ptr(),
        address(load_CE), address(phases_T), address(num_valid_1), num_tokens, num_experts, top_k,
        num_groups, top_groups, scale, score == "sigmoid", renormalize, library.num_threads,
    )  # fmt: skip
    call(library.kernels.moe_serve_router, arguments)
    return ids_TK, weights_TK
