"""Extreme temperatures, filters and logits give a token, never NaN; broken logits fail alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_serve.errors import LogitsError
from moe_serve.sampler import Sampler


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e4, 1e38])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 320])
def test_every_legal_extreme_gives_a_legal_token(make_row, scale, vocab_size):
    temperatures = [0, 1e-30, 1e-6, 1e-5, 1e-4, 0.7, 2]
    extremes = itertools.product(
        temperatures, [0, 1e-9, 0.5, 1], [-1, 0, 1, 3, 10**9], [0, 1e-9, 1]
    )
    rows = [
        make_row(seed=i, temperature=t, top_p=p, top_k=k, min_p=m, logprobs=1)
        for i, (t, p, k, m) in enumerate(extremes)
    ]
    # Distinct logits, evenly spaced in [-1, 1]
    grid = torch.linspace(-1, 1, vocab_size) * scale
    order = torch.rand(len(rows), vocab_size, generator=torch.manual_seed(7)).argsort(-1)
    logits = grid[order]
    best = logits.argmax(-1).tolist()
    for row, result, top in zip(
        rows, Sampler(vocab_size, frozenset())(logits, rows), best, strict=True
    ):
        assert 0 <= result.token_id < vocab_size
        params = row.params
        is_certain = params.is_greedy or params.top_p < 1e-3 or params.top_k == 1
        if is_certain or (params.temperature <= 1e-4 and scale >= 1):
            assert result.token_id == top
        assert -3.5e38 < result.logprobs.logprob <= 0


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_behave_as_greedy(make_row, temperature):
    logits = torch.tensor([[1e4, -1e4, 9.9e3, 0.0]])
    for seed in range(50):
        [result] = Sampler(4, frozenset())(logits, [make_row(seed=seed, temperature=temperature)])
        assert result.token_id == 0


def test_greedy_and_top_k_1_take_the_lowest_of_equal_ids(make_row):
    logits = torch.zeros(3, 4099)
    logits[:, [70, 4000, 12]] = 5.0
    rows = [make_row(temperature=0), make_row(top_k=1, seed=5), make_row(top_p=0, seed=6)]
    assert [r.token_id for r in Sampler(4099, frozenset())(logits, rows)] == [12, 12, 12]


def test_top_k_at_a_tie_keeps_the_lower_ids(make_row):
    logits = torch.zeros(200, 17)
    rows = [make_row(seed=seed, top_k=3) for seed in range(200)]
    assert {r.token_id for r in Sampler(17, frozenset())(logits, rows)} == {0, 1, 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_p": 0.5, "logprobs": 2}])
def test_a_row_with_broken_logits_fails_and_the_others_keep_their_tokens(make_row, bad, fields):
    sampler = Sampler(17, frozenset())
    logits = torch.randn(4, 17, generator=torch.manual_seed(8))
    rows = [make_row(seed=seed, **fields) for seed in range(4)]
    healthy = sampler(logits, rows)
    for damage in (slice(None), slice(3, 4)):
        broken = logits.clone()
        broken[2, damage] = bad
        results = sampler(broken, rows)
        assert isinstance(results[2], LogitsError)
        assert [r for i, r in enumerate(results) if i != 2] == [
            r for i, r in enumerate(healthy) if i != 2
        ]


def test_a_penalty_does_not_hide_broken_logits(make_row):
    logits = torch.tensor([[float("inf"), 0.0], [float("nan"), 0.0]])
    rows = [make_row(prompt=[0], repetition_penalty=2), make_row(min_tokens=1)]
    results = Sampler(2, frozenset({0}))(logits, rows)
    assert all(isinstance(result, LogitsError) for result in results)


def test_a_row_without_any_finite_logit_fails(make_row):
    [result] = Sampler(3, frozenset())(torch.full((1, 3), -torch.inf), [make_row()])
    assert isinstance(result, LogitsError)


def test_ids_that_the_model_masks_itself_are_never_chosen(make_row):
    logits = torch.full((100, 17), -torch.inf)
    logits[:, [4, 9]] = 0.0
    rows = [make_row(seed=seed, top_k=seed % 5, temperature=2) for seed in range(100)]
    assert {r.token_id for r in Sampler(17, frozenset())(logits, rows)} == {4, 9}
