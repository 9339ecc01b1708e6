"""Offline use: `LLM(...)` in one process, the same engine without a server."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from moe_serve.choices import Choice, fan_out
from moe_serve.config import BUILTIN_MODEL, EngineConfig
from moe_serve.engine import Engine
from moe_serve.engine_loader import load_engine
from moe_serve.errors import ConfigError, RequestError
from moe_serve.experts.recording import LoadRecording
from moe_serve.messages import AddRequest, RequestUpdate
from moe_serve.model_path import resolve_model
from moe_serve.output import OutputAssembler, SequenceOutput
from moe_serve.parallel.degrees import local_seat
from moe_serve.rank_processes import RankProcesses
from moe_serve.rank_setup import RankSetup
from moe_serve.sampling_params import SamplingParams
from moe_serve.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """`outputs`: the n choices, in order."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[SequenceOutput]


class LLM:
    """`LLM("builtin", max_num_seqs=8)`: any option of `EngineConfig` by its name.

    Raises `ConfigError` for an option that is unknown or cannot work, `CheckpointError` for a
    model that cannot be loaded. Use as a context manager, or call `close`, to free the memory.
    With `tensor_parallel_size` or `data_parallel_size` it starts the other ranks itself, on this
    host; the calling script needs `if __name__ == "__main__":`, as with any spawned process.
    """

    def __init__(self, model: str = BUILTIN_MODEL, **options: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        folder = resolve_model(model, options.pop("revision", None))
        self.config = EngineConfig(model=str(folder), **options)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._ranks = _start_ranks(self.config)
        try:
            if self._ranks is None:
                self.engine = load_engine(self.config, show_progress=True)
            else:
                self.engine = load_engine(
                    self.config,
                    self._ranks.seat,
                    init_method=self._ranks.init_method,
                    check_others=self._ranks.check,
                    show_progress=True,
                )
        except BaseException:
            if self._ranks is not None:
                self._ranks.kill()
            raise
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerateOutput]:
        """Complete texts or token-id lists, all in one batch; results in order.

        `params` for all, or one for each. Raises `RequestError` before anything runs if one of
        them cannot be served.
        """
        listed = _prompt_list(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in listed]
        texts = [p if isinstance(p, str) else None for p in listed]
        return self._complete(texts, ids, _params_list(params, len(ids)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
    ) -> GenerateOutput:
        """Answer one conversation through the model's chat template."""
        ids = self.tokenizer.render_chat(messages)
        return self._complete([None], [ids], _params_list(params, 1))[0]

    @property
    def expert_load(self) -> list[list[int]]:
        """Tokens that each expert got so far, by MoE layer and logical expert.

        Each row sums to top_k times the tokens computed: prompts and outputs, without what came
        from the prefix cache, and counted again where a preempted request was computed again.
        """
        counts: list[list[int]] = self.engine.executor.read_load().counts_LE.tolist()
        return counts

    @property
    def expert_recording(self) -> LoadRecording:
        """All that was counted so far, by phase: what `moe-serve report` is made of."""
        experts = self.engine.experts
        experts.monitor.collect()
        return experts.monitor.recording(experts.placement)

    def close(self) -> None:
        """Free the model and the KV pool, end the other ranks. The object is of no use then."""
        engine: Engine | None = self.__dict__.pop("engine", None)
        try:
            if engine is not None:
                engine.close()
        finally:
            if self._ranks is not None:
                self._ranks.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _complete(
        self, texts: list[str | None], ids: list[list[int]], params: list[SamplingParams]
    ) -> list[GenerateOutput]:
        choices = [fan_out(str(next(self._numbers)), one) for one in params]
        sequences = _Sequences(self.tokenizer)
        try:
            for prompt, group in zip(ids, choices, strict=True):
                for choice in group:
                    self.engine.add(sequences.open(choice, prompt))
            while self.engine.has_work:
                for update in self.engine.step().updates:
                    self.engine.abort(sequences.feed(update))
        finally:
            self.engine.abort(list(sequences.results))
        results = sequences.results
        return [
            GenerateOutput(
                prompt=text,
                prompt_token_ids=prompt,
                outputs=[results[choice.request_id] for choice in group],
            )
            for text, prompt, group in zip(texts, ids, choices, strict=True)
        ]


def _start_ranks(config: EngineConfig) -> RankProcesses | None:
    world_size = (config.tensor_parallel_size or 1) * config.data_parallel_size
    if world_size == 1:
        return None
    # What every rank would refuse is refused once, before any is started.
    RankSetup.make(config, local_seat(0, world_size))
    return RankProcesses(config, world_size)


class _Sequences:
    """The choices of one call, while they run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.results: dict[str, SequenceOutput] = {}
        self._tokenizer = tokenizer
        self._assemblers: dict[str, OutputAssembler] = {}

    def open(self, choice: Choice, prompt: list[int]) -> AddRequest:
        name = choice.request_id
        self.results[name] = SequenceOutput(request_id=name)
        self._assemblers[name] = OutputAssembler(name, self._tokenizer, choice.params, prompt)
        return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=choice.params)

    def feed(self, update: RequestUpdate) -> list[str]:
        """Take in news; the ids that a stop string ended, which the engine must forget."""
        delta = self._assemblers[update.request_id].feed(update)
        self.results[update.request_id].add(delta)
        return [update.request_id] if delta.needs_abort else []


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a sequence of integers is one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [prompt for prompt in prompts if isinstance(prompt, int)]
    several = [prompt for prompt in prompts if not isinstance(prompt, int)]
    if ids and several:
        raise RequestError(
            "prompts mixes token ids with prompts; put the ids in a list of their own"
        )
    return [ids] if ids else several


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params for {count} prompts; give one or as many")
    return list(params)
