"""`moe-serve generate [MODEL]`: complete prompts and print the texts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_serve import logs, settings
from moe_serve.config import EngineConfig, ServeConfig, option
from moe_serve.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from moe_serve.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(EngineConfig):
    """The engine's options and how to complete the prompts."""

    prompt: tuple[str, ...] = option((), "text to complete, repeatable; default: standard input")
    max_tokens: int = option(128, "most tokens to generate for a prompt")
    temperature: float = option(1.0, "0 takes the likeliest token each time")
    top_p: float = option(1.0, "sample from the likeliest tokens that sum to this probability")
    top_k: int = option(-1, "sample from that many likeliest tokens; -1 for all")
    min_p: float = option(0.0, "drop tokens less likely than this share of the likeliest")
    seed: int | None = option(None, "the same seed gives the same text; default: random")
    ignore_eos: bool = option(False, "go on after the end-of-sequence token")

    def sampling_params(self) -> SamplingParams:
        """Raises `RequestError` naming the field that is out of range."""
        from moe_serve.sampling_params import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


def run(argv: Sequence[str], *, prog: str) -> int:
    """Print the completion of each prompt, in order, a line of dashes between them."""
    config = settings.parse(
        GenerateConfig,
        argv,
        prog=prog,
        description="Complete prompts and print the texts.",
        other_types=[ServeConfig],
    )
    logs.set_up("warning", role="generate")
    params = config.sampling_params()
    prompts = list(config.prompt) or [_read_stdin()]
    from moe_serve.llm import LLM

    with LLM(**config.engine_options()) as llm:
        results = llm.generate(prompts, params)
    for output in (result.outputs[0] for result in results):
        if output.finish_reason == "error":
            raise EngineError(output.error)
    texts = [
        prompt + result.outputs[0].text for prompt, result in zip(prompts, results, strict=True)
    ]
    print("\n----\n".join(texts))
    return 0


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("there is no prompt; give --prompt TEXT, or text on standard input")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("standard input is empty; give text on it, or --prompt TEXT")
    return text
