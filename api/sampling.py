"""Request fields -> `SamplingParams`."""

from __future__ import annotations

import dataclasses
import re

from moe_serve.api.schemas.common import SamplingFields
from moe_serve.api.state import ApiState
from moe_serve.errors import RequestError
from moe_serve.sampling_params import SamplingParams


def sampling_params(
    state: ApiState,
    fields: SamplingFields,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Parameters as asked for; `fit` then cuts `max_tokens` for one prompt."""
    _check_limit("n", fields.n, state.config.max_choices, "--max-choices")
    max_tokens = fields.max_completion_tokens
    params = SamplingParams(
        n=fields.n,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        repetition_penalty=fields.repetition_penalty,
        seed=fields.seed,
        max_tokens=fields.max_tokens if max_tokens is None else max_tokens,
        min_tokens=fields.min_tokens,
        stop=tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        include_stop_str_in_output=fields.include_stop_str_in_output,
        ignore_eos=fields.ignore_eos,
        skip_special_tokens=fields.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_routed_experts=fields.return_routed_experts,
        logit_bias=_bias_by_id(fields.logit_bias),
    )
    params.check_vocabulary(state.info.vocab_size)
    return params


def fit(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Cut `max_tokens` to what the context leaves; None takes all of it."""
    room = max_model_len - num_prompt_tokens
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    min_tokens = min(params.min_tokens, max_tokens)
    return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min_tokens)


def check_num_sequences(state: ApiState, num_prompts: int, n: int) -> int:
    """Sequences of a request; raises above `max_choices`."""
    count = num_prompts * n
    limit = state.config.max_choices
    if count > limit:
        raise RequestError(
            f"{num_prompts} prompts x n {n} are {count} choices; at most {limit} "
            "are allowed (--max-choices)",
            param="prompt",
        )
    return count


def check_num_logprobs(state: ApiState, name: str, value: int | None) -> None:
    if value is not None:
        _check_limit(name, value, state.config.max_logprobs, "--max-logprobs")


def check_stream_options(fields: SamplingFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream true", param="stream_options")


def _check_limit(name: str, value: int, limit: int, flag: str) -> None:
    if value > limit:
        raise RequestError(f"{name} {value} is above the limit of {limit} ({flag})", param=name)


def _bias_by_id(logit_bias: dict[str, float]) -> dict[int, float]:
    """JSON object keys are strings; those that are no integers raise."""
    by_id = {}
    for key, bias in logit_bias.items():
        # int() alone would take "1_0", " 5" and other alphabets' digits.
        if not re.fullmatch(r"-?[0-9]{1,19}", key):
            raise RequestError(f"logit_bias key {key[:40]!r} is not a token id", param="logit_bias")
        by_id[int(key)] = bias
    return by_id
