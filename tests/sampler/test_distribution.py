"""The tokens follow the softmax, and the filters keep exactly what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_serve.kernels import keep_top, sampling
from moe_serve.sampler import Sampler


def oracle(
    logits: list[float], temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> tuple[np.ndarray, float]:
    """Probabilities by plain loops, and how close top-p or min-p came to deciding otherwise."""
    scaled = np.array(logits, dtype=np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    mass = sum(probs[i] for i in order)
    kept, total, margin = [], 0.0, 1.0
    for i in order:
        if kept and total >= top_p and top_p < 1:
            break
        kept.append(i)
        total += probs[i] / mass
        if top_p < 1:
            margin = min(margin, abs(total - top_p))
    if min_p:
        rest = [probs[i] for i in kept if logits[i] < max(logits)]
        margin = min([margin, *(abs(prob - min_p * probs.max()) for prob in rest)])
        kept = [i for i in kept if probs[i] >= min_p * probs.max()]
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result, margin


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    ],
)
def test_sampling_follows_the_softmax(make_row, fields):
    num = 20_000
    logits = torch.randn(17, generator=torch.manual_seed(5)) * 1.5
    rows = [make_row(seed=seed, **fields) for seed in range(num)]
    results = Sampler(17, frozenset())(logits.expand(num, -1), rows)
    counts = np.bincount([r.token_id for r in results], minlength=17)
    probs, _ = oracle(logits.tolist(), **fields)
    assert not counts[probs == 0].any()
    kept = probs > 0
    chi_square = float(((counts - num * probs)[kept] ** 2 / (num * probs[kept])).sum())
    # 99.9 % point of 16 degrees of freedom, the most there can be
    assert chi_square < 39.3
    assert np.abs(counts / num - probs).sum() / 2 < 0.02


@settings(max_examples=300, deadline=None)
@given(data=st.data(), vocab_size=st.sampled_from([1, 2, 3, 17, 40]))
def test_filters_keep_what_a_slow_reference_keeps(data, vocab_size):
    # A coarse grid, so that ties are common.
    grid = st.integers(-12, 12).map(lambda i: i / 4)
    logits = data.draw(st.lists(grid, min_size=vocab_size, max_size=vocab_size))
    temperature = data.draw(st.sampled_from([0.1, 0.7, 1.0, 2.0]))
    top_k = data.draw(st.integers(1, vocab_size))
    top_p = data.draw(st.one_of(st.sampled_from([0.0, 1e-9, 1.0]), st.floats(0, 1)))
    min_p = data.draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)))
    probs, margin = oracle(logits, temperature, top_k, top_p, min_p)
    assume(margin > 1e-5)
    x = torch.tensor([logits])
    weights = sampling.fixed_point_weights(
        x, x.amax(-1, keepdim=True), torch.tensor([[temperature]])
    )
    weights = keep_top.keep_top(
        weights, x, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64)
    )
    weights = sampling.keep_min_p(weights, torch.tensor([[min_p]], dtype=torch.float64))
    got = weights[0].double() / weights.sum()
    is_kept = (got > 0).numpy()
    assert not is_kept[probs == 0].any()
    # Below about 2**-56 of the likeliest a weight may round to zero.
    assert is_kept[probs > 1e-15].all()
    np.testing.assert_allclose(got.numpy(), probs, rtol=1e-5, atol=1e-15)


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 4099])
def test_looking_at_few_candidates_gives_the_same_as_sorting_all(monkeypatch, vocab_size):
    logits = torch.randn(40, vocab_size, generator=torch.manual_seed(6)).round(decimals=1)
    weights = sampling.fixed_point_weights(logits, logits.amax(-1, keepdim=True))
    top_k = torch.randint(1, vocab_size + 1, (40,))
    top_k[::2] = vocab_size
    top_p = torch.rand(40, dtype=torch.float64)
    top_p[::3] = 1
    results = []
    for candidates in (1, 3, 64, vocab_size):
        monkeypatch.setattr(keep_top, "NUM_CANDIDATES", candidates)
        results.append(keep_top.keep_top(weights, logits, top_k, top_p))
    assert all(torch.equal(results[0], result) for result in results[1:])
    assert ((results[0] > 0).sum(-1) <= top_k).all()


def test_rank_keys_order_by_logit_then_by_id():
    inf = float("inf")
    logits = torch.tensor([[0.0, -0.0, 1e-40, -1e-40, -inf, inf, -3.5, 2.0, 2.0, -3.5, -inf]])
    keys = keep_top.rank_keys(logits)[0].tolist()
    order = sorted(range(len(keys)), key=lambda i: -keys[i])
    assert order == [5, 7, 8, 2, 0, 1, 3, 6, 9, 4, 10]


@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 4099])
def test_the_ends_of_the_interval_never_pick_a_token_of_weight_zero(u, vocab_size):
    weights = torch.zeros(1, vocab_size, dtype=torch.int64)
    alive = {vocab_size // 2, vocab_size // 3}
    weights[0, list(alive)] = 2 ** sampling.weight_bits(vocab_size) - 1
    picked = sampling.pick(weights, torch.tensor([[u]], dtype=torch.float64))
    assert int(picked) in alive


def test_equal_weights_fill_the_62_bits_without_overflow():
    for vocab_size in (1, 2, 3, 4096, 4099, 2**18):
        logits = torch.zeros(1, vocab_size)
        weights = sampling.fixed_point_weights(logits, logits[:, :1])
        assert 2**61 < int(weights.sum()) <= 2**62
        last = sampling.pick(weights, torch.tensor([[1 - 2**-53]], dtype=torch.float64))
        assert int(last) == vocab_size - 1
