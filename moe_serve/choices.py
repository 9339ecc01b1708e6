"""One request for n choices becomes n requests of one sequence."""

from __future__ import annotations

import dataclasses

from moe_serve.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the n sequences: `params.n` is 1."""

    index: int
    request_id: str
    params: SamplingParams


def fan_out(request_id: str, params: SamplingParams) -> list[Choice]:
    """The `params.n` sequences of a request, in order: ids "<id>-0", "<id>-1", ...

    Each gets its own stream of random numbers; with a seed they repeat from run to run.
    """
    return [
        Choice(
            index=index,
            request_id=f"{request_id}-{index}",
            params=params.for_choice(index),
        )
        for index in range(params.n)
    ]
