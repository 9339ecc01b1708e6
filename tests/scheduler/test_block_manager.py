from __future__ import annotations

import pytest

from moe_serve import prefix_index
from moe_serve.block_manager import BlockManager
from moe_serve.sampling_params import SamplingParams


def compute(manager, request) -> None:
    """Admit the request and have all its tokens computed."""
    assert manager.can_admit(request)
    manager.admit(request)
    request.num_computed_tokens = request.num_tokens
    manager.cache_computed(request)
    manager.check_request(request)
    manager.check_integrity()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_seen_before_leaves_at_least_one_token_to_compute(make_request, num_tokens):
    manager = BlockManager(9, 16, True)
    first = make_request("first", range(num_tokens))
    compute(manager, first)
    second = make_request("second", range(num_tokens))
    assert manager.admit(second) == (num_tokens - 1) // 16 * 16
    num_shared = (num_tokens - 1) // 16
    assert second.block_ids[:num_shared] == first.block_ids[:num_shared]
    assert not set(second.block_ids[num_shared:]) & set(first.block_ids)
    assert manager.num_references(first.block_ids[-1]) == 1


def test_blocks_are_found_only_once_they_are_full_and_computed(make_request):
    manager = BlockManager(9, 4, True)
    first = make_request("first", range(11))
    manager.admit(first)
    for num_computed, num_hits in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)):
        first.num_computed_tokens = num_computed
        manager.cache_computed(first)
        other = make_request(f"other {num_computed}", range(11))
        assert manager.find_prefix(other) == list(first.block_ids[:num_hits])


def test_equal_tokens_after_another_beginning_are_not_a_hit(make_request):
    manager = BlockManager(9, 4, True)
    compute(manager, make_request("first", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert manager.find_prefix(make_request("tail", [5, 6, 7, 8, 9])) == []
    assert manager.find_prefix(make_request("moved", [9, 9, 9, 9, 5, 6, 7, 8, 9])) == []


def test_a_digest_collision_is_a_miss(make_request, monkeypatch):
    monkeypatch.setattr(prefix_index, "hash_block", lambda parent, tokens: b"same")
    manager = BlockManager(9, 4, True)
    first = make_request("first", [1, 2, 3, 4, 5])
    compute(manager, first)
    assert manager.find_prefix(make_request("equal", [1, 2, 3, 4, 6])) == list(first.block_ids[:1])
    other = make_request("other", [4, 3, 2, 1, 5])
    assert manager.find_prefix(other) == []
    compute(manager, other)
    # The first one keeps its place, and the second stays without identity.
    assert manager.find_prefix(make_request("again", [1, 2, 3, 4, 6])) == list(first.block_ids[:1])
    assert manager.find_prefix(make_request("other again", [4, 3, 2, 1, 6])) == []


def test_a_collision_of_parents_is_a_miss(make_request, monkeypatch):
    real = prefix_index.hash_block
    monkeypatch.setattr(prefix_index, "hash_block", lambda parent, tokens: real(b"", tokens))
    manager = BlockManager(9, 4, True)
    compute(manager, make_request("first", [1, 2, 3, 4, 5, 6, 7, 8]))
    other = make_request("other", [9, 9, 9, 9])
    compute(manager, other)
    # Block [5, 6, 7, 8] has the digest that it would have here, but came after other tokens.
    mixed = make_request("mixed", [9, 9, 9, 9, 5, 6, 7, 8, 1])
    assert manager.find_prefix(mixed) == list(other.block_ids)


def test_the_oldest_block_is_evicted_first_and_tails_before_heads(make_request):
    manager = BlockManager(6, 2, True)
    old, new = make_request("old", [1, 2, 3, 4]), make_request("new", [5, 6, 7, 8])
    compute(manager, old)
    compute(manager, new)
    (old_head, old_tail), (new_head, new_tail) = old.block_ids, new.block_ids
    manager.release(old)
    manager.release(new)
    assert manager.num_free_blocks == 6 and manager.usage == 0
    taken = make_request("taken", range(100, 111))
    manager.admit(taken)
    # Two blocks never used, then by age; all six are wanted here.
    assert list(taken.block_ids[2:]) == [old_tail, old_head, new_tail, new_head]
    assert manager.usage == 1


def test_an_evicted_block_loses_its_identity(make_request):
    manager = BlockManager(4, 2, True)
    old = make_request("old", [1, 2, 3, 4, 5])
    compute(manager, old)
    head = old.block_ids[0]
    manager.release(old)
    compute(manager, make_request("other", [9, 9, 9, 9, 9]))
    manager.check_integrity()
    assert manager.find_prefix(make_request("again", [1, 2, 3, 4, 5])) == [head]
    compute(manager, make_request("last", [8]))
    assert manager.find_prefix(make_request("and again", [1, 2, 3, 4, 5])) == []


def test_a_hit_moves_a_block_out_of_reach_of_eviction(make_request):
    manager = BlockManager(4, 2, True)
    old = make_request("old", [1, 2, 3, 4, 5])
    compute(manager, old)
    shared = old.block_ids[:2]
    manager.release(old)
    again = make_request("again", [1, 2, 3, 4, 6])
    assert manager.admit(again) == 4 and again.block_ids[:2] == shared
    assert manager.num_free_blocks == 1
    assert not manager.can_admit(make_request("three", [7, 7, 7]))
    manager.check_integrity()


def test_hits_on_free_blocks_do_not_count_as_room(make_request):
    manager = BlockManager(4, 2, True)
    old = make_request("old", [1, 2, 3, 4])
    compute(manager, old)
    manager.release(old)
    holder = make_request("holder", [9, 9])
    compute(manager, holder)
    # Three blocks are free, two of them hits: five tokens need three, seven need four.
    assert manager.can_admit(make_request("five", [1, 2, 3, 4, 5]))
    assert not manager.can_admit(make_request("seven", [1, 2, 3, 4, 5, 6, 7]))
    assert not manager.can_admit(make_request("five, one spare", [1, 2, 3, 4, 5]), 1)


def test_hits_on_blocks_in_use_cost_nothing(make_request):
    manager = BlockManager(4, 2, True)
    compute(manager, make_request("first", [1, 2, 3, 4, 5]))
    second = make_request("second", [1, 2, 3, 4, 6])
    assert manager.num_free_blocks == 1 and manager.can_admit(second)
    manager.admit(second)
    assert manager.num_free_blocks == 0
    manager.check_integrity()


def test_queries_change_nothing(make_request):
    manager = BlockManager(6, 2, True)
    old = make_request("old", [1, 2, 3, 4, 5])
    compute(manager, old)
    manager.release(old)
    order = list(manager._free)
    other = make_request("other", [1, 2, 3, 4, 5])
    manager.find_prefix(other)
    manager.can_admit(other)
    manager.can_append(other)
    assert list(manager._free) == order and not other.block_ids
    assert other.num_computed_tokens == 0


def test_growth_takes_a_block_only_at_a_boundary(make_request):
    manager = BlockManager(3, 2, True)
    request = make_request("request", [1, 2, 3])
    compute(manager, request)
    num_blocks = []
    for token_id in (4, 5, 6):
        request.output_token_ids.append(token_id)
        assert manager.can_append(request)
        manager.append(request)
        num_blocks.append(len(request.block_ids))
    assert num_blocks == [2, 3, 3]
    request.output_token_ids.append(7)
    assert not manager.can_append(request)


def test_outputs_are_cached_too(make_request):
    manager = BlockManager(8, 2, True)
    request = make_request("request", [1, 2, 3])
    request.output_token_ids = [4, 5]
    compute(manager, request)
    manager.release(request)
    assert len(manager.find_prefix(make_request("next turn", [1, 2, 3, 4, 5, 6]))) == 2


def test_prompt_logprobs_bypass_the_cache_until_they_are_complete(make_request):
    manager = BlockManager(8, 2, True)
    compute(manager, make_request("first", [1, 2, 3, 4, 5]))
    request = make_request("second", [1, 2, 3, 4, 5])
    request.sampling = SamplingParams(prompt_logprobs=0)
    assert manager.find_prefix(request) == []
    request.output_token_ids.append(6)
    assert len(manager.find_prefix(request)) == 2


def test_without_prefix_caching_nothing_is_shared(make_request):
    manager = BlockManager(8, 2, False)
    first, second = make_request("first", range(5)), make_request("second", range(5))
    compute(manager, first)
    compute(manager, second)
    assert second.num_computed_tokens == 5 and manager.num_free_blocks == 2
    manager.release(first)
    manager.release(second)
    assert manager.admit(make_request("third", range(5))) == 0
    manager.check_integrity()
