"""The model in the package against transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

from moe_serve.model_path import resolve_model

NUM_TOKENS = 64
PROMPTS = ["Once upon a time", "The", "There was a little girl who lived in a house by the river"]


@pytest.fixture
def builtin(tiny_model):
    return tiny_model(resolve_model("builtin"))


@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_text_equals_transformers(builtin, text: str) -> None:
    prompt = encode(builtin, text)
    expected = builtin.reference().generate(prompt, NUM_TOKENS)
    found = builtin.runner().generate(prompt, NUM_TOKENS)
    # transformers stops at the end of the text; the bare runner does not.
    num_tokens = len(expected.token_ids)
    assert found.token_ids[:num_tokens] == expected.token_ids
    difference = (found.logprobs[:num_tokens] - expected.logprobs).abs().max()
    assert difference <= 1e-4


@pytest.mark.parametrize("text", PROMPTS)
def test_bf16_logprobs_of_chosen_tokens_stay_close_to_fp32(builtin, text: str) -> None:
    prompt = encode(builtin, text)
    found = builtin.runner(torch.bfloat16).generate(prompt, NUM_TOKENS)
    token_ids = [*prompt, *found.token_ids]
    exact = builtin.reference().score(token_ids)[len(prompt) - 1 : -1]
    chosen = torch.tensor(found.token_ids)[:, None]
    difference = found.logprobs.gather(1, chosen) - exact.gather(1, chosen)
    # Other processors round elsewhere: allow that two experts of nearly equal score swap once.
    assert (difference.abs() <= 5e-2).float().mean() >= 0.95


@pytest.mark.parametrize("text", PROMPTS)
def test_bf16_strays_from_fp32_no_further_than_transformers(builtin, text: str) -> None:
    prompt = encode(builtin, text)
    token_ids = prompt + builtin.runner().generate(prompt, NUM_TOKENS).token_ids
    exact = builtin.reference().score(token_ids)
    ours = (builtin.runner(torch.bfloat16).score(token_ids) - exact).abs().mean()
    theirs = (builtin.reference(torch.bfloat16).score(token_ids) - exact).abs().mean()
    assert ours <= 1.1 * theirs


def encode(builtin, text: str) -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(builtin.folder)(text)["input_ids"]


# From "The Happy Prince" (Oscar Wilde, 1888), which the model was not trained on.
HELD_OUT = (
    'High above the city, on a tall column, stood the statue of the Happy Prince. "He is as '
    'beautiful as a weathercock," remarked one of the Town Councillors. "Why can\'t you be like '
    'the Happy Prince?" asked a sensible mother of her little boy who was crying for the moon. One '
    "night there flew over the city a little Swallow. His friends had gone away to Egypt six weeks "
    "before, but he had stayed behind, for he was in love with the most beautiful Reed."
)


def test_it_is_as_its_card_says(builtin) -> None:
    spec = builtin.decoder().spec
    moe = spec.moe_layers[0]
    assert 6e6 <= spec.num_parameters <= 10e6
    assert (moe.num_experts, moe.router.top_k, spec.max_position) == (16, 2, 1024)
    assert 4000 <= spec.vocab_size <= 8192
    assert sum(file.stat().st_size for file in builtin.folder.iterdir()) < 20e6
    card = (builtin.folder / "README.md").read_text()
    assert f"{spec.num_parameters / 1e6:.1f} M-parameter" in card


def test_it_has_learned_english(builtin) -> None:
    token_ids = encode(builtin, HELD_OUT)
    logprobs = builtin.runner().score(token_ids)[:-1]
    nats = -logprobs.gather(1, torch.tensor(token_ids)[1:, None]).sum()
    # Untrained it is 2.4 (ln 4096 a token of 3.5 bytes), good models of any size are below 0.7.
    assert nats / len(HELD_OUT.encode()) < 1.15
