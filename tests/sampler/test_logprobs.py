"""Log-probabilities are the model's own, whatever was done to choose the token."""

from __future__ import annotations

import json
import math

import pytest
import torch

from moe_serve import logprobs as logprobs_module
from moe_serve.errors import LogitsError
from moe_serve.logprobs import prompt_logprobs
from moe_serve.sampler import Sampler


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 320, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_equal_log_softmax(vocab_size, dtype):
    logits = (torch.randn(33, vocab_size, generator=torch.manual_seed(9)) * 4).to(dtype)
    token_ids = torch.randint(vocab_size, (33,)).tolist()
    expected = torch.log_softmax(logits.double(), dim=-1)
    entries = prompt_logprobs(logits, token_ids, 5)
    assert len(entries) == 33
    for entry, token_id, row in zip(entries, token_ids, expected, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=2e-6)
        order = sorted(range(vocab_size), key=lambda i: (-float(row[i]), i))
        assert entry.top_token_ids == order[:5]
        assert entry.rank == 1 + order.index(token_id)
        assert entry.top_logprobs == pytest.approx([float(row[i]) for i in order[:5]], abs=2e-6)


def test_no_alternatives_still_give_the_chosen_token_and_its_rank():
    [entry] = prompt_logprobs(torch.tensor([[1.0, 3.0, 2.0]]), [2], 0)
    assert (entry.rank, entry.top_token_ids, entry.top_logprobs) == (2, [], [])
    assert entry.logprob == pytest.approx(2 - math.log(math.e + math.e**2 + math.e**3))


def test_long_prompts_in_blocks_give_the_same_as_at_once(monkeypatch):
    logits = torch.randn(33, 17, generator=torch.manual_seed(10))
    at_once = prompt_logprobs(logits, [3] * 33, 4)
    monkeypatch.setattr(logprobs_module, "_MAX_BLOCK_ELEMENTS", 5 * 17)
    assert prompt_logprobs(logits, [3] * 33, 4) == at_once
    assert prompt_logprobs(logits[:0], [], 4) == []


def test_filters_bias_and_penalties_leave_them_finite_and_the_model_s_own(make_row):
    logits = torch.randn(3, 320, generator=torch.manual_seed(11)) * 1e3
    plain = make_row(temperature=0, logprobs=5)
    steered = make_row(
        top_k=1, logprobs=5, logit_bias={5: -100.0}, frequency_penalty=2, output=[5], min_tokens=9
    )
    other = make_row(top_k=1)
    results = Sampler(320, frozenset({7}))(logits[[0, 0, 1]], [plain, steered, other])
    assert results[2].logprobs is None
    assert results[0].logprobs.top_logprobs == results[1].logprobs.top_logprobs
    for result in results[:2]:
        entry = result.logprobs
        assert entry.token_id == result.token_id
        assert len(entry.top_token_ids) == 5
        json.dumps([entry.logprob, *entry.top_logprobs], allow_nan=False)


def test_each_row_gets_as_many_alternatives_as_it_asks_for(make_row):
    rows = [make_row(logprobs=count) for count in (None, 0, 1, 3, 100)]
    results = Sampler(17, frozenset())(torch.randn(5, 17), rows)
    sizes = [r.logprobs and len(r.logprobs.top_token_ids) for r in results]
    assert sizes == [None, 0, 1, 3, 17]


def test_a_token_the_model_rules_out_gets_a_finite_number():
    [entry] = prompt_logprobs(torch.tensor([[0.0, -torch.inf]]), [1], 2)
    assert entry.rank == 2 and entry.top_token_ids == [0, 1]
    json.dumps([entry.logprob, *entry.top_logprobs], allow_nan=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_prompt_logits_are_an_error(bad):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(LogitsError, match="row 1"):
        prompt_logprobs(logits, [0, 0, 0], 1)
