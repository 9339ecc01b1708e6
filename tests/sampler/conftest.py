"""Rows to sample, with defaults for all that a test does not care about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_serve.sampler import SamplingRow
from moe_serve.sampling_params import SamplingParams

MakeRow = Callable[..., SamplingRow]


@pytest.fixture(scope="session")
def make_row() -> MakeRow:
    """make_row(seed=.., prompt=.., output=.., **fields of SamplingParams) -> SamplingRow."""

    def make(
        *, seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **fields
    ) -> SamplingRow:
        return SamplingRow(
            params=SamplingParams(**fields),
            seed=seed,
            prompt_token_ids=prompt or [0],
            output_token_ids=output or [],
        )

    return make
