"""How one request wants its tokens chosen and when it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from moe_serve.errors import RequestError

# Below this, scaled logits overflow long before the choice could differ from the argmax.
GREEDY_BELOW = 1e-5
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BIASED_TOKENS = 1024
_GOLDEN = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked once, on construction; a bad value raises `RequestError` naming the field.

    - `temperature` in [0, 2]; 0 (and anything below 1e-5) is greedy.
    - `top_p` in [0, 1], 1 = off, 0 keeps only the most likely token; `top_k` -1 or 0 = off;
      `min_p` in [0, 1], 0 = off: drops tokens less likely than `min_p` times the likeliest.
    - `frequency_penalty`, `presence_penalty` in [-2, 2], over output tokens only;
      `repetition_penalty` in (0, 10], over prompt and output.
    - `seed`: equal seed, prompt and parameters give equal tokens in any batch. None: random.
    - `max_tokens` None: as many as the context leaves; 0: the prompt alone is evaluated.
    - `min_tokens`: no end-of-sequence, stop id or stop string before that many output tokens.
    - `logprobs` / `prompt_logprobs`: how many alternatives to report per position (0 = the chosen
      token alone). They are those of the model itself: before penalties, bias, temperature and
      filters, hence always finite.
    - `return_routed_experts`: tell which experts each computed token chose, in each MoE layer.
    - `logit_bias`: token id -> value in [-100, 100], added before sampling.
    - At most 16 stop strings of 1024 characters, 256 stop ids and 1024 biased tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))
        self._check_ranges()
        self._check_counts()
        self._check_stop()

    def _check_ranges(self) -> None:
        _in_range("temperature", self.temperature, 0, 2)
        _in_range("top_p", self.top_p, 0, 1)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("repetition_penalty", self.repetition_penalty, 0, 10)
        if self.repetition_penalty == 0:
            raise _bad("repetition_penalty", 0, "must be above 0")
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", bias, -100, 100, where=f" for token {token_id}")

    def _check_counts(self) -> None:
        _at_least("n", self.n, 1)
        _at_least("top_k", self.top_k, -1)
        _at_least("min_tokens", self.min_tokens, 0)
        for name in ("max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"exceeds max_tokens {self.max_tokens}")
        if self.seed is not None and not -MAX_SEED <= self.seed <= MAX_SEED:
            raise _bad("seed", self.seed, f"must be between {-MAX_SEED} and {MAX_SEED}")

    def _check_stop(self) -> None:
        _at_most("stop", len(self.stop), MAX_STOP_STRINGS)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _at_most("logit_bias", len(self.logit_bias), MAX_BIASED_TOKENS)
        for text in self.stop:
            if not text:
                raise RequestError("stop holds an empty string, which any text contains; remove it",
                                   param="stop")  # fmt: skip
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"a stop string has {len(text)} characters; at most {MAX_STOP_LENGTH}",
                    param="stop",
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` for a token id that the model does not have."""
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", self.logit_bias, vocab_size)

    def for_choice(self, index: int) -> SamplingParams:
        """Parameters of choice `index` of n: its own stream of random numbers, n = 1."""
        seed = self.seed
        if seed is not None and index:
            seed = (seed + index * _GOLDEN) % (MAX_SEED + 1)
        return dataclasses.replace(self, n=1, seed=seed)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `RequestError` naming the first id outside [0, vocab_size)."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise _bad(name, token_id, f"is not a token id; ids go from 0 to {vocab_size - 1}")


def _bad(name: str, value: object, why: str) -> RequestError:
    return RequestError(f"{name} {value} {why}", param=name)


def _in_range(name: str, value: float, low: float, high: float, where: str = "") -> None:
    # Written so that NaN, which fails every comparison, is refused too.
    if not (math.isfinite(value) and low <= value <= high):
        raise _bad(name, value, f"must be a finite number between {low} and {high}{where}")


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} has {count} entries; at most {limit} are allowed", param=name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise _bad(name, value, f"must be at least {low}")
