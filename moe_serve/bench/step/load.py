"""An engine brought to where one kind of step can be taken again and again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from moe_serve.config import EngineConfig
from moe_serve.engine import Engine
from moe_serve.errors import ConfigError, EngineError
from moe_serve.messages import AddRequest, EngineOutputs, EngineReady
from moe_serve.model_runner import StepResult
from moe_serve.sampling_params import SamplingParams
from moe_serve.step import ChunkResult, SampledToken, StepPlan


class Load(Protocol):
    """`name` says it in a few words. `requests`: those whose step comes next."""

    requests: list[AddRequest]

    @property
    def name(self) -> str: ...

    def fitting(self, config: EngineConfig) -> EngineConfig:
        """The limits of a step raised to what this one takes."""

    def prepare(self, engine: Engine, num_steps: int) -> None:
        """Once, before any of at most `num_steps` steps.

        Raises `ConfigError` where the engine cannot take such steps.
        """

    def before_step(self, engine: Engine) -> None:
        """Before each."""


@dataclasses.dataclass(kw_only=True)
class DecodeLoad:
    """`batch_size` requests get a token each; in the first step each sees `context` positions."""

    batch_size: int
    context: int
    rng: np.random.Generator
    requests: list[AddRequest] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"decode of {self.batch_size} requests, context {self.context}"

    def fitting(self, config: EngineConfig) -> EngineConfig:
        num_tokens = self.batch_size * self.context
        return dataclasses.replace(
            config,
            max_num_seqs=max(config.max_num_seqs, self.batch_size),
            max_num_batched_tokens=max(config.max_num_batched_tokens, num_tokens),
        )

    def prepare(self, engine: Engine, num_steps: int) -> None:
        longest, most = self.context + num_steps, engine.info.max_model_len
        if longest > most:
            raise ConfigError(
                f"--context {self.context} and {num_steps} steps are more than the context of "
                f"{most} tokens"
            )
        self._check_pool(engine.info, longest)
        fill_pool(engine)
        for number in range(self.batch_size):
            # The last token of the context is made up with the prompt.
            request = make_request(engine, str(number), self.context - 1, num_steps + 2, self.rng)
            self.requests.append(request)
            engine.add(request)
        with prompts_made_up(engine):
            engine.step()
        assert engine.stats.num_running == self.batch_size and not engine.stats.num_waiting

    def _check_pool(self, info: EngineReady, longest: int) -> None:
        # Admission leaves room for what the others take in a step: at most a block each.
        num_blocks = self.batch_size * (1 + -(-longest // info.block_size))
        if num_blocks > info.num_kv_blocks:
            raise ConfigError(
                f"--batch-size {self.batch_size}, of {longest} tokens each, needs {num_blocks} KV "
                f"blocks of {info.num_kv_blocks} that there are; raise --kv-cache-memory"
            )

    def before_step(self, engine: Engine) -> None:
        pass


@dataclasses.dataclass(kw_only=True)
class PrefillLoad:
    """One new prompt of `num_tokens`, computed in one step."""

    num_tokens: int
    rng: np.random.Generator
    count: int = 0
    requests: list[AddRequest] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"prefill of {self.num_tokens} tokens"

    def fitting(self, config: EngineConfig) -> EngineConfig:
        num_tokens = max(config.max_num_batched_tokens, self.num_tokens)
        return dataclasses.replace(config, max_num_batched_tokens=num_tokens)

    def prepare(self, engine: Engine, num_steps: int) -> None:
        if self.num_tokens >= engine.info.max_model_len:
            raise ConfigError(
                f"--prefill {self.num_tokens} must be below the context of "
                f"{engine.info.max_model_len} tokens"
            )

    def before_step(self, engine: Engine) -> None:
        request = make_request(engine, f"prompt {self.count}", self.num_tokens, 1, self.rng)
        self.requests = [request]
        self.count += 1
        engine.add(request)


def make_request(
    engine: Engine, name: str, length: int, max_tokens: int, rng: np.random.Generator
) -> AddRequest:
    """Greedy, of random tokens."""
    return AddRequest(
        request_id=name,
        prompt_token_ids=rng.integers(0, engine.info.vocab_size, length).tolist(),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
    )


def take_step(engine: Engine) -> EngineOutputs:
    """One step; `EngineError` where a request fails in it."""
    outputs = engine.step()
    for update in outputs.updates:
        if update.finish_reason == "error":
            raise EngineError(update.error)
    return outputs


def fill_pool(engine: Engine) -> None:
    """Numbers where keys and values will be taken to lie.

    Memory that was never written is one page of zeros to the system, which never leaves the cache.
    """
    for kv in engine.executor.runner.pool:
        for pool in (kv.keys_BsNh, kv.values_BsNh):
            pool.copy_(torch.randn(pool.shape[1:]).to(pool.dtype))


@contextlib.contextmanager
def prompts_made_up(engine: Engine) -> Iterator[None]:
    """Inside, steps compute nothing, and every token is 1: what is kept of a prompt is what the
    pool holds. A decode step takes as long, and a long context is there at once.
    """
    executor = engine.executor

    def run(plan: StepPlan) -> StepResult:
        results = [
            ChunkResult(sampled=SampledToken(token_id=1) if chunk.samples else None)
            for chunk in plan.chunks
        ]
        return StepResult(results=results, failures={})

    executor.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del executor.run
