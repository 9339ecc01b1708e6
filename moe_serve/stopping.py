"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from moe_serve.messages import FinishReason
from moe_serve.request import Request


class Ending(NamedTuple):
    """`stop_reason`: the stop token id that the client named, if one ended it."""

    reason: FinishReason
    stop_reason: int | None = None


def find_ending(request: Request, eos_token_ids: Set[int]) -> Ending | None:
    """Whether the newest output token, if any, is the last one.

    Stop tokens count from the `min_tokens`th output token on; they win over the length. Stop
    strings are not known here: whoever turns tokens into text aborts the request.
    """
    sampling = request.sampling
    if request.output_token_ids and request.num_output_tokens >= sampling.min_tokens:
        token_id = request.output_token_ids[-1]
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return Ending("stop")
        if token_id in sampling.stop_token_ids:
            return Ending("stop", token_id)
    if request.num_output_tokens >= request.max_tokens:
        return Ending("length")
    return None
