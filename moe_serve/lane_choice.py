"""Which lane a request goes to. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MAX_LEAD = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneOffer:
    """A lane that has room for the request now.

    - `num_cached_tokens`: how much of the request it need not compute.
    - `num_running`: its requests.
    - `num_tokens_left`: their known tokens that it still has to compute.
    """

    lane: int
    num_cached_tokens: int
    num_running: int
    num_tokens_left: int

    @property
    def load(self) -> int:
        """Work ahead in tokens: those left, and one for each request, which brings at least that
        in every later step."""
        return self.num_tokens_left + self.num_running


def choose_lane(offers: Sequence[LaneOffer]) -> int:
    """The longest prefix hit wins, then the least load, then the lowest index.

    `MAX_LEAD` (8): a lane so many running requests ahead of the emptiest offer is passed over.
    Otherwise one prompt that all requests begin with would draw all of them to one lane.

    Example: hits of 32 and 0 tokens, 9 and 2 running: the first lane; with 10 and 2: the second.
    """
    fewest = min(offer.num_running for offer in offers)
    best = min(
        (offer for offer in offers if offer.num_running < fewest + MAX_LEAD),
        key=lambda offer: (-offer.num_cached_tokens, offer.load, offer.lane),
    )
    return best.lane
