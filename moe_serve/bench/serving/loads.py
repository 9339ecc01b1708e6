"""A load: prompts from a source, and when to send them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Protocol

from moe_serve.bench.serving.bodies import Planned, Wording
from moe_serve.bench.serving.material import Material
from moe_serve.bench.serving.prompts import Lengths, Prompt, from_trace, synthetic
from moe_serve.bench.serving.traces import TraceRow


class Source(Protocol):
    """Gives the prompts of a run, one after another: a long trace is too large for memory."""

    def prompts(self, draw: int) -> Iterator[Prompt]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    material: Material
    lengths: Lengths
    num_prompts: int
    seed: int
    is_text: bool

    def prompts(self, draw: int) -> Iterator[Prompt]:
        return synthetic(
            self.material, self.lengths, self.num_prompts,
            seed=self.seed, draw=draw, is_text=self.is_text,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    material: Material
    rows: Sequence[TraceRow]
    block_tokens: int
    seed: int
    is_text: bool

    def prompts(self, draw: int) -> Iterator[Prompt]:
        return from_trace(
            self.material, self.rows, self.block_tokens,
            seed=self.seed, draw=draw, is_text=self.is_text,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The prompts of a file, from its start again where it has too few; the same in each draw."""

    from_file: Sequence[Prompt]
    num_prompts: int

    def prompts(self, draw: int) -> Iterator[Prompt]:
        return islice(cycle(self.from_file), self.num_prompts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`due`: seconds from the start of a run, for each prompt. Draw 0 is for warming up."""

    source: Source
    due: Sequence[float]
    wording: Wording

    def requests(self, draw: int, model: str) -> list[Planned]:
        """Raises `ConfigError` for a prompt that the endpoint cannot take."""
        prompts = self.source.prompts(draw)
        return [
            self.wording.planned(model, prompt, due)
            for due, prompt in zip(self.due, prompts, strict=True)
        ]

    def warmup(self, num_requests: int, model: str) -> list[Planned]:
        """The first prompts of draw 0, all due at once; no more than a run has."""
        return [
            self.wording.planned(model, prompt, 0.0)
            for prompt in islice(self.source.prompts(0), num_requests)
        ]
