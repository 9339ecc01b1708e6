from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from moe_serve.block_pool import FreeBlocks


def test_blocks_come_out_in_the_order_in_which_they_went_in():
    free = FreeBlocks(7)
    assert [free.pop_front() for _ in range(7)] == [0, 1, 2, 3, 4, 5, 6]
    for block_id in (4, 1, 6):
        free.push_back(block_id)
    free.push_front(2)
    assert list(free) == [2, 4, 1, 6]
    free.remove(1)
    assert list(free) == [2, 4, 6] and 1 not in free and len(free) == 3
    free.check_integrity()


@given(st.integers(1, 9), st.lists(st.tuples(st.sampled_from("fbpr"), st.integers(0, 8))))
def test_the_list_behaves_as_a_deque(num_blocks, actions):
    free, model = FreeBlocks(num_blocks), deque(range(num_blocks))
    for action, number in actions:
        block_id = number % num_blocks
        if action == "p" and model:
            assert free.pop_front() == model.popleft()
        elif action == "r" and block_id in model:
            free.remove(block_id)
            model.remove(block_id)
        elif action in "fb" and block_id not in model:
            (free.push_front if action == "f" else free.push_back)(block_id)
            (model.appendleft if action == "f" else model.append)(block_id)
        assert list(free) == list(model) and len(free) == len(model)
        free.check_integrity()
