"""Bias, masks and penalties: exact tokens, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from moe_serve.errors import NoTokenLeftError
from moe_serve.logit_edits import edit_logits
from moe_serve.sampler import Sampler, SamplingRow
from moe_serve.sampling_params import SamplingParams
from moe_serve.step import SampledToken


def fixed_logits(width: int = 320, **values: float) -> torch.Tensor:
    logits = torch.zeros(width)
    for name, value in values.items():
        logits[int(name[1:])] = value
    return logits


def run_fixed_model(logits: torch.Tensor, params: SamplingParams, prompt: list[int], steps: int):
    sampler = Sampler(logits.numel(), frozenset())
    output: list[int] = []
    for _ in range(steps):
        row = SamplingRow(params=params, seed=0, prompt_token_ids=prompt, output_token_ids=output)
        [result] = sampler(logits.unsqueeze(0), [row])
        assert isinstance(result, SampledToken)
        output = [*output, result.token_id]
    return output


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        # 65: 10, 9.4, 8.8 < 9; then 66: 8.4 < 8.8; 65: 8.2 < 8.4; 66: 7.8 < 8.2
        ("frequency_penalty", 0.6, [65, 65, 66, 65, 66, 65]),
        # 9.4 stays above 9
        ("presence_penalty", 0.6, [65, 65, 65, 65, 65, 65]),
        # The prompt already brings 65 to 6.67; one 66 brings 66 to 6
        ("repetition_penalty", 1.5, [66, 65, 65, 65, 65, 65]),
        # Level at 9: the lower id wins
        ("presence_penalty", 1.0, [65, 65, 65, 65, 65, 65]),
        ("presence_penalty", 1.5, [65, 66, 65, 65, 65, 65]),
        ("frequency_penalty", -0.6, [65, 65, 65, 65, 65, 65]),
    ],
)
def test_penalties_give_the_tokens_worked_out_by_hand(field, value, expected):
    params = SamplingParams(temperature=0, **{field: value})
    logits = fixed_logits(_65=10, _66=9)
    assert run_fixed_model(logits, params, [65] * 10, 6) == expected


def test_repetition_penalty_multiplies_logits_that_are_not_positive(make_row):
    logits = torch.tensor([[2.0, -2.0, 0.0, 2.0, -2.0]])
    edit_logits(logits, [make_row(prompt=[0, 1], output=[2], repetition_penalty=4)], frozenset())
    assert logits.tolist() == [[0.5, -8.0, 0.0, 2.0, -2.0]]


def test_all_penalties_add_up_in_order(make_row):
    logits = torch.tensor([[8.0, 8.0, 8.0]])
    row = make_row(
        prompt=[0],
        output=[1, 1, 1],
        repetition_penalty=2,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    edit_logits(logits, [row], frozenset())
    assert logits.tolist() == [[4.0, 4 - 1.5 - 0.25, 8.0]]


def test_rows_that_ask_for_nothing_keep_their_bits(make_row):
    logits = torch.randn(5, 17)
    before = logits.clone()
    rows = [make_row(output=[3, 3]) for _ in range(5)]
    rows[2] = make_row(output=[3, 4], frequency_penalty=1, logit_bias={5: 1.0}, min_tokens=9)
    edit_logits(logits, rows, frozenset({6}))
    changed = (logits != before).nonzero().tolist()
    assert changed == [[2, 3], [2, 4], [2, 5], [2, 6]]


def test_bias_moves_the_choice_and_comes_before_penalties(make_row):
    logits = fixed_logits(17, _1=3.0)
    assert run_fixed_model(logits, SamplingParams(temperature=0), [0], 1) == [1]
    biased = SamplingParams(temperature=0, logit_bias={9: 100.0, 1: -100.0})
    assert run_fixed_model(logits, biased, [0], 2) == [9, 9]
    edited = logits.unsqueeze(0).clone()
    edit_logits(
        edited, [make_row(prompt=[9], logit_bias={9: 6.0}, repetition_penalty=2)], frozenset()
    )
    assert edited[0, 9] == 3.0


def test_bias_of_minus_100_bans_a_token_from_sampling(make_row):
    sampler = Sampler(2, frozenset())
    rows = [make_row(seed=s, logit_bias={0: -100.0}) for s in range(200)]
    assert {r.token_id for r in sampler(torch.zeros(200, 2), rows)} == {1}


def test_min_tokens_holds_back_end_and_stop_ids_until_enough_are_there(make_row):
    logits = fixed_logits(17, _3=9.0, _4=8.0, _5=7.0)
    sampler = Sampler(17, frozenset({3, 99}))
    rows = [
        make_row(output=[0] * count, temperature=0, min_tokens=2, stop_token_ids=(4,))
        for count in range(4)
    ]
    results = sampler(logits.expand(4, -1), rows)
    assert [r.token_id for r in results] == [5, 5, 3, 3]


def test_ignore_eos_does_not_mask_the_end(make_row):
    logits = fixed_logits(17, _3=9.0)
    [result] = Sampler(17, frozenset({3}))(
        logits.unsqueeze(0), [make_row(temperature=0, ignore_eos=True)]
    )
    assert result.token_id == 3


def test_a_row_whose_masks_leave_nothing_fails_alone(make_row):
    sampler = Sampler(2, frozenset({0, 1}))
    rows = [make_row(temperature=0), make_row(min_tokens=1), make_row(temperature=0, min_tokens=1)]
    first, *failed = sampler(torch.tensor([[0.0, 1.0]] * 3), rows)
    assert first.token_id == 1
    assert all(isinstance(r, NoTokenLeftError) and "leave no token" in str(r) for r in failed)


def test_the_smallest_repetition_penalty_neither_overflows_nor_revives_a_masked_token(make_row):
    sampler = Sampler(3, frozenset({0}))
    row = make_row(prompt=[0, 1, 2], repetition_penalty=1e-300, min_tokens=5)
    [result] = sampler(torch.tensor([[-1.0, 3.0, 1.0]]), [row])
    assert result.token_id in (1, 2)
