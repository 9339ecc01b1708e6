"""A row's token is a function of its logits, parameters, seed and length, and of nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from moe_serve.sampler import Sampler, uniform

PARAMS = [
    {},
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.7},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.01},
    {"min_p": 0.3},
    {"frequency_penalty": 1.5, "logprobs": 3},
    {"repetition_penalty": 1.3, "top_k": 4000},
    {"logit_bias": {0: 5.0}, "min_tokens": 12, "logprobs": 0},
]


def random_rows(make_row, vocab_size: int, count: int):
    draw = random.Random(count)
    return [
        make_row(
            seed=draw.randrange(-(2**63), 2**63),
            prompt=[draw.randrange(vocab_size) for _ in range(4)],
            output=[draw.randrange(vocab_size) for _ in range(draw.randrange(6))],
            **draw.choice(PARAMS),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 320, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_any_company_and_position(make_row, vocab_size, dtype):
    sampler = Sampler(vocab_size, frozenset({vocab_size}))
    rows = random_rows(make_row, vocab_size, 33)
    logits = (torch.randn(33, vocab_size, generator=torch.manual_seed(1)) * 3).to(dtype)
    alone = [sampler(logits[i : i + 1], [rows[i]])[0] for i in range(33)]
    for attempt in range(4):
        order = random.Random(attempt).sample(range(33), 33 - 5 * attempt)
        together = sampler(logits[order], [rows[i] for i in order])
        assert together == [alone[i] for i in order]


@pytest.mark.parametrize("vocab_size", [17, 4099])
def test_bf16_gives_the_same_as_its_fp32_upcast(make_row, vocab_size):
    sampler = Sampler(vocab_size, frozenset({0}))
    rows = random_rows(make_row, vocab_size, 33)
    logits = torch.randn(33, vocab_size, generator=torch.manual_seed(2)).bfloat16()
    assert sampler(logits, rows) == sampler(logits.float(), rows)


def test_the_logits_are_left_unchanged(make_row):
    logits = torch.randn(33, 320, generator=torch.manual_seed(3))
    before = logits.clone()
    Sampler(320, frozenset({0}))(logits, random_rows(make_row, 320, 33))
    assert torch.equal(logits, before)


def test_equal_seeds_agree_and_different_seeds_differ(make_row):
    sampler = Sampler(320, frozenset())
    logits = torch.zeros(1, 320)

    def tokens(seed: int) -> tuple[int, ...]:
        output: list[int] = []
        for _ in range(16):
            row = make_row(seed=seed, output=output, temperature=0.8)
            output = [*output, sampler(logits, [row])[0].token_id]
        return tuple(output)

    assert tokens(42) == tokens(42)
    assert len({tokens(seed) for seed in range(20)}) == 20
    assert len(set(tokens(42))) > 8, "each position has a number of its own"


def test_an_empty_batch_gives_nothing(make_row):
    assert Sampler(17, frozenset())(torch.zeros(0, 17), []) == []


def test_uniform_numbers_are_fixed_for_good():
    assert uniform(0, 0) == uniform(0, 0)
    assert len({uniform(seed, index) for seed in (-1, 0, 1, 2**63) for index in range(50)}) == 200
    numbers = torch.tensor([uniform(seed, 3) for seed in range(4000)], dtype=torch.float64)
    assert 0 <= float(numbers.min()) and float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    # chi-square with 19 degrees of freedom exceeds 43.8 once in a thousand
    assert float(((counts - 200) ** 2 / 200).sum()) < 43.8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab_size", [17, 4099, 151936])
def test_a_row_alone_equals_the_row_in_company_on_a_gpu(make_row, vocab_size):
    sampler = Sampler(vocab_size, frozenset())
    rows = random_rows(make_row, vocab_size, 33)
    logits = torch.randn(33, vocab_size, generator=torch.manual_seed(4)).cuda() * 3
    alone = [sampler(logits[i : i + 1], [rows[i]])[0] for i in range(33)]
    assert sampler(logits, rows) == alone
