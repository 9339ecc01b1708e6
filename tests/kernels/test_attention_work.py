"""The plan of attention: every token of every sequence once, and every split of those it splits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from moe_serve.kernels.attention_work import (
    MAX_PARTS,
    AttentionWork,
    Cut,
    plan_attention,
)

CPU = torch.device("cpu")


def test_the_example_of_the_docstring() -> None:
    work = plan_attention([0, 1, 4], [9, 3], Cut(query_tokens=2, split=4))
    assert work.counts_4.tolist() == [1, 3, 3, 1]
    assert work.blocks_Q4.tolist() == [[0, 0, 1, 8], [1, 3, 1, 2], [1, 1, 2, 0]]
    assert work.parts_I6.tolist() == [[0, 0, 1, 8, split, split] for split in range(3)]
    assert work.merges_M4.tolist() == [[0, 8, 0, 1]]


STEPS = [
    ([1], [1]),
    ([1] * 5, [600, 1, 512, 513, 5000]),
    ([1, 1, 300, 17], [9000, 0, 300, 4017]),
    ([1] * 40, [100_000] * 40),
    ([2, 7, 129], [2, 0, 100_129]),
    ([], []),
]


@pytest.mark.parametrize(("tokens", "lens"), STEPS)
@pytest.mark.parametrize("query_tokens", [1, 8, 64])
def test_every_token_is_in_one_block_and_splits_have_rows_of_their_own(
    tokens: Sequence[int], lens: Sequence[int], query_tokens: int
) -> None:
    cut = Cut(query_tokens=query_tokens, split=512)
    starts = [0, *itertools.accumulate(tokens)]
    work = plan_attention(starts, lens, cut)
    num_split, *counts = work.counts_4.tolist()
    assert counts == [len(work.blocks_Q4), len(work.parts_I6), len(work.merges_M4)]

    expected = {
        (sequence, starts[sequence] + token): lens[sequence] - count + token
        for sequence, count in enumerate(tokens)
        for token in range(count)
        if lens[sequence]
    }
    found = {}
    for sequence, row, count, position in work.blocks_Q4.tolist():
        assert 1 <= count <= query_tokens
        found |= {(sequence, row + i): position + i for i in range(count)}
    assert found == expected
    assert int(work.blocks_Q4[:, 2].sum()) == len(expected)
    keys = [position + count for _, _, count, position in work.blocks_Q4.tolist()]
    assert keys == sorted(keys, reverse=True)

    # What the kernels write and read: a workspace row for each token and split.
    written = [
        (row + i, split, slot + i)
        for _, row, count, _, split, slot in work.parts_I6.tolist()
        for i in range(count)
    ]
    rows = [slot for _, _, slot in written]
    assert len(set(rows)) == len(rows) and max(rows, default=0) < MAX_PARTS
    places = {(row, split): slot for row, split, slot in written}
    split_rows = set()
    for row, position, slot, stride in work.merges_M4.tolist():
        split_rows.add(row)
        for split in range(position // 512 + 1):
            assert places[row, split] == slot + split * stride
    in_split_blocks = [
        row + i for _, row, count, _ in work.blocks_Q4[:num_split].tolist() for i in range(count)
    ]
    assert split_rows == set(in_split_blocks) and len(work.merges_M4) == len(split_rows)


def test_few_long_sequences_are_split_and_many_are_not() -> None:
    cut = Cut(query_tokens=8, split=512)
    few = plan_attention(range(5), [8000] * 4, cut)
    assert few.counts_4.tolist() == [4, 4, 64, 4]
    many = plan_attention(range(601), [8000] * 600, cut)
    assert many.counts_4.tolist() == [0, 600, 0, 0]
    short = plan_attention(range(5), [512] * 4, cut)
    assert short.counts_4.tolist() == [0, 4, 0, 0]


@pytest.mark.parametrize(("tokens", "lens"), STEPS)
def test_a_plan_fits_into_one_of_the_greatest_size(tokens: list[int], lens: list[int]) -> None:
    cut = Cut(query_tokens=8, split=512)
    largest = AttentionWork.of_limits(cut, max_sequences=64, max_tokens=512, device=CPU)
    assert largest.counts_4.tolist() == [0] * 4
    largest.copy_(plan_attention(range(65), [7000] * 64, cut))
    work = plan_attention([0, *itertools.accumulate(tokens)], lens, cut).to(CPU)
    largest.copy_(work)
    assert torch.equal(largest.counts_4, work.counts_4)
    assert torch.equal(largest.blocks_Q4[: len(work.blocks_Q4)], work.blocks_Q4)
    assert torch.equal(largest.parts_I6[: len(work.parts_I6)], work.parts_I6)
    assert torch.equal(largest.merges_M4[: len(work.merges_M4)], work.merges_M4)


def test_every_part_of_a_plan_is_aligned_alike() -> None:
    """Else Triton compiles its kernels once more, for the first odd number of parts."""
    cut = Cut(query_tokens=2, split=4)
    work = plan_attention([0, 1, 4], [9, 3], cut).to(CPU)
    assert len(work.parts_I6) % 2 == 1
    for part in (work, AttentionWork.of_limits(cut, 5, 7, CPU)):
        tensors = (part.counts_4, part.blocks_Q4, part.parts_I6, part.merges_M4)
        assert [(x.data_ptr() - part.counts_4.data_ptr()) % 16 for x in tensors] == [0] * 4
