"""Fields that clients of this API know and this server does not offer.

Ignoring one in silence would give an answer that looks right and is not, so it is refused,
except with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_serve.errors import RequestError

# Field -> values that ask for nothing. Null never gets here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # other engines'
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # of one endpoint only; where an endpoint has it, its model checks it
    "add_special_tokens": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
}


def check_supported(values: Mapping[str, Any], *, known: Collection[str]) -> None:
    """Raise for a field of `NEUTRAL` that asks for something and that the endpoint lacks."""
    for name, value in values.items():
        if name in known or name not in NEUTRAL:
            continue
        if not any(value == neutral for neutral in NEUTRAL[name]):
            raise RequestError(f"{name} is not supported by this server; leave it out", param=name)
