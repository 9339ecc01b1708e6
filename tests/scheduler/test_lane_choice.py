from __future__ import annotations

import random

import pytest

from moe_serve.lane_choice import MAX_LEAD, LaneOffer, choose_lane


def offers(*rows):
    """(hit tokens, running requests, tokens left) of lanes 0, 1, ..."""
    return [
        LaneOffer(lane=lane, num_cached_tokens=hit, num_running=running, num_tokens_left=left)
        for lane, (hit, running, left) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("rows", "lane"),
    [
        ([(0, 3, 40)], 0),
        ([(0, 0, 0), (0, 0, 0), (0, 0, 0)], 0),
        ([(0, 1, 8), (0, 1, 7)], 1),
        ([(0, 2, 8), (0, 1, 8)], 1),
        # One long prompt outweighs many decodes.
        ([(0, 1, 300), (0, 7, 7)], 1),
        ([(0, 0, 0), (16, 7, 500)], 1),
        ([(16, 0, 0), (32, 7, 500), (32, 6, 500)], 2),
        # The example of the docstring.
        ([(32, 9, 0), (0, 2, 0)], 0),
        ([(32, 10, 0), (0, 2, 0)], 1),
        ([(64, 12, 0), (32, 9, 0), (0, 2, 90)], 1),
    ],
)
def test_hit_then_load_then_index(rows, lane):
    assert choose_lane(offers(*rows)) == lane


def test_the_order_of_the_offers_does_not_matter_and_the_lead_is_bounded():
    numbers = random.Random(5)
    for _ in range(500):
        rows = [
            (numbers.choice([0, 16, 32]), numbers.randrange(20), numbers.randrange(4))
            for _ in range(numbers.randint(1, 5))
        ]
        given = offers(*rows)
        lane = choose_lane(given)
        assert rows[lane][1] < min(running for _, running, _ in rows) + MAX_LEAD
        numbers.shuffle(given)
        assert choose_lane(given) == lane


def test_offers_name_their_lane_themselves():
    """Lanes without room make no offer."""
    assert choose_lane(offers((0, 0, 0), (0, 2, 2), (0, 1, 1))[1:]) == 2
