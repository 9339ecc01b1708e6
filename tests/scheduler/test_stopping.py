from __future__ import annotations

import pytest

from moe_serve.sampling_params import SamplingParams
from moe_serve.stopping import Ending, find_ending

EOS = frozenset({0, 9})


@pytest.mark.parametrize(
    ("outputs", "options", "ending"),
    [
        ([5], {}, None),
        ([5, 0], {}, Ending("stop")),
        ([5, 9], {}, Ending("stop")),
        ([0, 5], {}, None),
        ([5, 0], {"ignore_eos": True}, None),
        ([5, 7], {"stop_token_ids": (7, 8)}, Ending("stop", 7)),
        ([5, 0], {"ignore_eos": True, "stop_token_ids": (0,)}, Ending("stop", 0)),
        ([5, 0], {"min_tokens": 3}, None),
        ([5, 7], {"min_tokens": 3, "stop_token_ids": (7,)}, None),
        ([5, 5, 0], {"min_tokens": 3}, Ending("stop")),
        ([5, 5, 5, 5], {}, Ending("length")),
        ([5, 5, 5, 0], {}, Ending("stop")),
        ([5, 5, 5, 0], {"ignore_eos": True}, Ending("length")),
    ],
)
def test_the_newest_token_ends_the_request_or_not(make_request, outputs, options, ending):
    request = make_request("a", [0, 7, 9])
    request.sampling = SamplingParams(**options)
    request.max_tokens = 4
    request.output_token_ids = outputs
    assert find_ending(request, EOS) == ending


def test_a_request_for_no_tokens_ends_with_its_prompt(make_request):
    request = make_request("a", [5, 0])
    request.max_tokens = 0
    assert find_ending(request, EOS) == Ending("length")
