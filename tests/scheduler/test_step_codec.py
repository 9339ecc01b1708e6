"""Ranks that only hear what changed compute what rank 0 planned."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
import torch

from moe_serve.batch import build_batch
from moe_serve.errors import LogitsError
from moe_serve.sampling_params import MAX_SEED, SamplingParams
from moe_serve.step import StepPlan
from moe_serve.step_codec import StepDecoder, StepEncoder, StepMessage

CPU = torch.device("cpu")
_wire = msgspec.msgpack.Decoder(StepMessage)


class Ranks:
    """An encoder, and one decoder a lane behind a wire of bytes."""

    def __init__(self, engine):
        self.engine = engine
        self.lanes = engine.scheduler.lanes
        self.encoder = StepEncoder(len(self.lanes))
        self.decoders = [StepDecoder() for _ in self.lanes]
        self.messages: list[StepMessage] = []
        self.num_bytes: list[int] = []
        self.num_unsent = 0

    def send(self, plan):
        """The plan of each lane, as its other ranks see it."""
        data = [msgspec.msgpack.encode(message) for message in self.encoder.encode(plan)]
        self.num_bytes = [len(one) for one in data]
        self.messages = [_wire.decode(one) for one in data]
        return [
            decoder.decode(message)
            for decoder, message in zip(self.decoders, self.messages, strict=True)
        ]

    def step(self, before_update=lambda: None, *, is_sent=True):
        """One step that is computed from what arrived. None: nothing to do."""
        plan = self.engine.plan()
        if plan is None:
            return None
        parts = [plan]
        if is_sent:
            parts = self.send(plan)
            self.check(plan, parts)
        self.num_unsent += not is_sent
        results = [result for part in parts for result in self.engine.run(part)]
        before_update()
        self.engine.finish_step(plan, results)
        return plan

    def check(self, plan, parts) -> None:
        for lane, part in zip(self.lanes, parts, strict=True):
            check_equal(plan.of_lane(lane.index), part, lane.block_manager.block_size)
        for mirrored, running in zip(self.mirrored(), self.running(), strict=True):
            # One that was admitted by a plan that was not sent is told of when it is computed.
            assert mirrored == running or (self.num_unsent and set(mirrored) < set(running))
        assert self.encoder.num_known == sum(map(len, self.mirrored()))

    def mirrored(self) -> list[list[str]]:
        return [sorted(decoder.request_ids) for decoder in self.decoders]

    def running(self) -> list[list[str]]:
        return [sorted(request.request_id for request in lane.running) for lane in self.lanes]


def check_equal(plan, part, block_size) -> None:
    """That the part computes and samples what the plan of its lane does."""
    assert part.num_tokens_of_lanes == plan.num_tokens_of_lanes
    assert part.records_routes == plan.records_routes
    wanted, got = build_batch(plan, block_size, CPU), build_batch(part, block_size, CPU)
    assert torch.equal(wanted.token_ids_T, got.token_ids_T)
    for field in dataclasses.fields(wanted.context):
        one, other = getattr(wanted.context, field.name), getattr(got.context, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for chunk, mirrored in zip(plan.chunks, part.chunks, strict=True):
        assert mirrored.request is not chunk.request
        for name in ("start", "num_tokens", "is_last", "samples"):
            assert getattr(mirrored, name) == getattr(chunk, name)
        for name in ("request_id", "prompt_token_ids", "output_token_ids", "block_ids", "sampling",
                     "seed", "max_tokens", "lane", "status"):  # fmt: skip
            assert getattr(mirrored.request, name) == getattr(chunk.request, name), name


def random_options(numbers: random.Random) -> dict:
    return {
        "max_tokens": numbers.choice([None, 0, 1, 5, 17]),
        "ignore_eos": numbers.random() < 0.5,
        "stop_token_ids": tuple(numbers.sample(range(97), numbers.choice([0, 0, 9]))),
        "stop": numbers.choice([(), ("end", "\n\n")]),
        "prompt_logprobs": numbers.choice([None, None, 2]),
        "return_routed_experts": numbers.random() < 0.2,
        "logprobs": numbers.choice([None, 0, 5]),
        "temperature": numbers.choice([0, 0.0, 0.7]),
        "top_k": numbers.choice([-1, 40]),
        "repetition_penalty": numbers.choice([1.0, 1.1]),
        "seed": numbers.choice([None, 0, MAX_SEED, -MAX_SEED]),
        "logit_bias": numbers.choice([{}, {3: -100.0, 11: 0.5}]),
    }


def random_engine(make_engine, numbers: random.Random):
    # Pools so small that there are many preemptions.
    return make_engine(
        numbers.randint(3, 10),
        numbers.randint(1, 4),
        num_lanes=numbers.randint(1, 3),
        enable_prefix_caching=numbers.random() < 0.7,
        max_num_seqs=numbers.randint(1, 5),
        max_num_batched_tokens=numbers.randint(1, 17),
    )


class Clients:
    """Add and abort at random; an id is used again once its request has ended."""

    def __init__(self, engine, numbers: random.Random):
        self.engine = engine
        self.numbers = numbers
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}

    def add(self) -> None:
        scheduler = self.engine.scheduler
        free = sorted({f"request {number}" for number in range(12)} - set(scheduler.request_ids))
        if not free:
            return
        request_id = self.numbers.choice(free)
        longest = scheduler.max_model_len - 1
        prompt = self.numbers.choices([1, 2], k=self.numbers.randint(1, min(longest, 14)))
        options = random_options(self.numbers)
        self.engine.endings.pop(request_id, None)
        self.engine.outputs.pop(request_id, None)
        self.engine.prompt_logprobs.pop(request_id, None)
        self.engine.routes.pop(request_id, None)
        self.engine.add(request_id, prompt, priority=self.numbers.randint(-1, 1), **options)
        self.asked[request_id] = (prompt, SamplingParams(**options))

    def abort(self) -> None:
        request_ids = self.engine.scheduler.request_ids
        if request_ids:
            self.engine.scheduler.abort([self.numbers.choice(request_ids)])

    def act(self) -> None:
        for _ in range(self.numbers.choice([0, 0, 1, 3])):
            self.add()
        if self.numbers.random() < 0.15:
            self.abort()


@pytest.mark.parametrize("share_unsent", [0, 0.3])
@pytest.mark.parametrize("seed", range(40))
def test_mirrors_compute_what_was_planned(make_engine, expected_outputs, seed, share_unsent):
    numbers = random.Random(seed)
    engine = random_engine(make_engine, numbers)
    ranks, clients = Ranks(engine), Clients(engine, numbers)
    for _ in range(60):
        clients.act()
        ranks.step(clients.act, is_sent=numbers.random() >= share_unsent)
    while ranks.step():
        pass
    for request_id in engine.endings:
        prompt, sampling = clients.asked[request_id]
        wanted = expected_outputs(prompt, sampling, engine.scheduler.max_model_len)
        assert engine.outputs[request_id] == wanted
        engine.check_routes(request_id, prompt, are_wanted=sampling.return_routed_experts)
    ranks.send(StepPlan.join([()] * len(ranks.lanes)))
    assert not any(ranks.mirrored()) and ranks.encoder.num_known == 0


def test_a_request_is_sent_whole_once_and_then_by_its_news(make_engine):
    engine = make_engine(1000, 4, max_num_batched_tokens=2048)
    engine.add("a", range(3000), max_tokens=50)
    ranks = Ranks(engine)
    ranks.step()
    (message,) = ranks.messages
    assert [new.request_id for new in message.new_requests] == ["a"]
    assert message.chunks == [("a", 0, 2048, 0, [], list(range(750)))]
    assert ranks.num_bytes[0] > 3000
    ranks.step()
    assert ranks.messages[0].chunks == [("a", 2048, 952, 0, [], [])]
    for number in range(1, 50):
        ranks.step()
        (message,) = ranks.messages
        assert message.dropped_ids == [] and message.new_requests == []
        ((_, start, num_tokens, _, tokens, block_ids),) = message.chunks
        assert (start, num_tokens, len(tokens)) == (2999 + number, 1, 1)
        assert len(block_ids) == (number % 4 == 1)
        assert ranks.num_bytes[0] < 120
    assert ranks.step() is None and len(engine.outputs["a"]) == 50


def test_idle_lanes_hear_what_the_others_compute(make_engine):
    engine = make_engine(num_lanes=3)
    engine.add("a", range(5), max_tokens=3)
    ranks = Ranks(engine)
    ranks.step()
    assert [message.lane for message in ranks.messages] == [0, 1, 2]
    assert [len(message.chunks) for message in ranks.messages] == [1, 0, 0]
    assert [message.num_tokens_of_lanes for message in ranks.messages] == [[5, 0, 0]] * 3


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("is_wanted", [False, True])
def test_all_lanes_hear_that_routes_are_recorded(make_engine, is_asked, is_wanted):
    engine = make_engine(num_lanes=2)
    engine.add("a", range(5), return_routed_experts=is_asked)
    ranks = Ranks(engine)
    parts = ranks.send(engine.scheduler.schedule(records_routes=is_wanted))
    assert [len(part.chunks) for part in parts] == [1, 0]
    assert [part.records_routes for part in parts] == [is_asked or is_wanted] * 2


def test_endings_are_told_with_the_next_message(make_engine):
    engine = make_engine(max_num_seqs=8)
    for name, max_tokens in (("stays", 9), ("ends", 2), ("aborted", 9), ("fails", 9)):
        engine.add(name, [1, 2], max_tokens=max_tokens)
    ranks = Ranks(engine)
    ranks.step()
    ranks.step(lambda: engine.record(engine.scheduler.fail("fails", LogitsError("broken"))))
    engine.scheduler.abort(["aborted"])
    # A new request of an old name is a new one.
    engine.add("ends", [3, 4], max_tokens=9, seed=5)
    engine.endings.pop("ends")
    ranks.step()
    (message,) = ranks.messages
    assert sorted(message.dropped_ids) == ["aborted", "ends", "fails"]
    assert [(new.request_id, new.seed) for new in message.new_requests] == [("ends", 5)]
    assert ranks.mirrored() == [["ends", "stays"]]


def run_until_back(make_engine, num_lanes: int, *, is_sent: bool):
    """Until the second of two requests has been preempted and runs again; the first one is alone
    in lane 0 then."""
    engine = make_engine(10, 4, num_lanes=num_lanes, max_num_seqs=2, enable_prefix_caching=False)
    engine.add("first", range(14), max_tokens=26)
    if num_lanes == 2:
        engine.add("beside", range(20, 34), max_tokens=4)
    engine.add("wanders", range(40, 54), max_tokens=20)
    ranks = Ranks(engine)
    ranks.step()
    (request,) = [one for one in engine.scheduler.lanes[0].running if one.request_id == "wanders"]
    messages = []
    while not (request.num_preemptions and request.lane is not None):
        ranks.step(is_sent=is_sent)
        messages.append(ranks.messages)
    return ranks, request, messages


def test_a_request_that_moves_is_dropped_here_and_whole_there(make_engine):
    ranks, request, messages = run_until_back(make_engine, 2, is_sent=True)
    assert request.lane == 1
    here, there = messages[-1]
    assert here.dropped_ids == ["wanders"] and here.new_requests == []
    assert [new.request_id for new in there.new_requests] == ["wanders"]
    (news,) = [chunk for chunk in there.chunks if chunk.request_id == "wanders"]
    assert (news.start, news.num_tokens) == (0, 14 + len(news.output_token_ids))
    assert len(news.output_token_ids) > 1 and news.block_ids == list(request.block_ids)
    while ranks.step():
        pass


def test_a_request_that_came_back_unseen_is_told_anew(make_engine):
    """Its blocks are others, even if nothing was sent while it had none."""
    ranks, request, _ = run_until_back(make_engine, 1, is_sent=False)
    assert request.lane == 0 and request.num_preemptions == 1
    ranks.step()
    (message,) = ranks.messages
    assert message.dropped_ids == ["first", "wanders"]
    assert [new.request_id for new in message.new_requests] == ["wanders"]
    assert ranks.mirrored() == [["wanders"]]
    while ranks.step():
        pass
