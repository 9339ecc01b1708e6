from __future__ import annotations

import random

from moe_serve.request_queue import LOOK_AHEAD, MAX_OVERTAKES, RequestQueue, WaitingQueue


def test_order_is_priority_then_arrival(make_request):
    requests = [
        make_request(f"{priority}-{arrival}", [1], priority=priority, arrival_index=arrival)
        for priority, arrival in ((0, 2), (-1, 3), (5, 0), (0, 1), (5, 4))
    ]
    queue = RequestQueue()
    for request in random.Random(3).sample(requests, 5):
        queue.add(request)
    assert [request.request_id for request in queue] == ["-1-3", "0-1", "0-2", "5-0", "5-4"]
    assert queue.last.request_id == "5-4"
    queue.remove(requests[3])
    assert [request.request_id for request in queue] == ["-1-3", "0-2", "5-0", "5-4"]


def test_only_the_front_of_a_long_queue_is_tried(make_request):
    queue = WaitingQueue()
    for index in range(10_000):
        queue.add(make_request(str(index), [1], arrival_index=index))
    tried = []
    assert queue.pop_first(lambda request: tried.append(request)) is None
    assert [request.request_id for request in tried] == [str(i) for i in range(LOOK_AHEAD)]


def test_a_request_is_overtaken_a_bounded_number_of_times(make_request):
    queue = WaitingQueue()
    large = make_request("large", [1] * 9)
    queue.add(large)
    for index in range(1, 41):
        queue.add(make_request(str(index), [1], arrival_index=index))

    def fits(request):
        return request is not large

    started = [queue.pop_first(fits) for _ in range(MAX_OVERTAKES)]
    assert [request.request_id for request in started] == [str(i + 1) for i in range(16)]
    assert queue.pop_first(fits) is None
    assert queue.pop_first(lambda request: True) is large
    assert queue.pop_first(fits).request_id == "17"


def test_overtaking_is_counted_anew_once_a_request_has_started(make_request):
    queue = WaitingQueue()
    preempted = make_request("preempted", [1] * 9)
    for start in (0, 100):
        queue.add(preempted)
        for index in range(1, MAX_OVERTAKES + 1):
            queue.add(make_request(str(start + index), [1], arrival_index=start + index))
            assert queue.pop_first(lambda request: request is not preempted) is not None
        assert queue.pop_first(lambda request: True) is preempted


def test_one_of_higher_priority_does_not_count_as_overtaking(make_request):
    queue = WaitingQueue()
    queue.add(make_request("later", [1], arrival_index=0))
    for index in range(1, MAX_OVERTAKES + 5):
        queue.add(make_request(str(index), [1], arrival_index=index, priority=-1))
        assert queue.pop_first(lambda request: True).request_id == str(index)
    queue.add(make_request("last", [1], arrival_index=99))
    assert queue.pop_first(lambda request: request.request_id == "last") is not None
