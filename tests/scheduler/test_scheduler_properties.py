"""Anything may happen in any order: nothing is lost, leaked, aliased or late."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moe_serve.errors import LogitsError
from moe_serve.sampling_params import SamplingParams


def machine_type(make_engine, expected_outputs):
    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(
            num_lanes=st.integers(1, 3),
            num_blocks=st.integers(2, 12),
            block_size=st.integers(1, 4),
            enable_prefix_caching=st.booleans(),
            max_num_seqs=st.integers(1, 5),
            budget=st.integers(1, 17),
        )
        def start(
            self, num_lanes, num_blocks, block_size, enable_prefix_caching, max_num_seqs, budget
        ):
            self.engine = make_engine(
                num_blocks,
                block_size,
                num_lanes=num_lanes,
                enable_prefix_caching=enable_prefix_caching,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
            )
            self.max_model_len = num_blocks * block_size
            self.accepted = {}
            self.ended_early = set()

        # Few different tokens, so that prefixes are often shared.
        @rule(
            prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
            max_tokens=st.one_of(st.none(), st.integers(0, 12)),
            priority=st.integers(-1, 1),
            stops=st.lists(st.integers(1, 96), max_size=30),
            options=st.fixed_dictionaries(
                {
                    "ignore_eos": st.booleans(),
                    "prompt_logprobs": st.sampled_from([None, None, 0]),
                    "return_routed_experts": st.sampled_from([False, False, True]),
                }
            ),
        )
        def add(self, prompt, max_tokens, priority, stops, options):
            prompt = prompt[: self.max_model_len - 1]
            if not prompt:
                return
            options |= {"max_tokens": max_tokens, "stop_token_ids": tuple(stops)}
            request_id = f"request {len(self.accepted)}"
            self.engine.add(request_id, prompt, priority=priority, **options)
            self.accepted[request_id] = (prompt, SamplingParams(**options))

        @rule(data=st.data())
        @precondition(lambda self: self.accepted)
        def abort(self, data):
            request_id = data.draw(st.sampled_from(sorted(self.accepted)))
            self.end(request_id, fails=False)

        @rule(num_steps=st.integers(1, 6))
        def step(self, num_steps):
            for _ in range(num_steps):
                self.engine.step()

        @rule(data=st.data(), fails=st.booleans())
        @precondition(lambda self: self.engine.scheduler.has_work)
        def step_with_an_end_before_the_update(self, data, fails):
            plan = self.engine.plan()
            results = self.engine.run(plan)
            self.end(data.draw(st.sampled_from(self.engine.scheduler.request_ids)), fails=fails)
            self.engine.finish_step(plan, results)

        def end(self, request_id, *, fails):
            was_alive = request_id in self.engine.scheduler.request_ids
            assert was_alive == (request_id not in self.engine.endings.keys() | self.ended_early)
            if fails:
                self.engine.record(self.engine.scheduler.fail(request_id, LogitsError("broken")))
            else:
                ended = self.engine.scheduler.abort([request_id])
                assert ended == ([request_id] if was_alive else [])
            if was_alive:
                self.ended_early.add(request_id)

        @invariant()
        def integrity_holds_and_nobody_is_lost(self):
            if not hasattr(self, "engine"):
                return
            scheduler = self.engine.scheduler
            scheduler.check_integrity()
            ended = self.engine.endings.keys() | self.ended_early
            assert ended | set(scheduler.request_ids) == self.accepted.keys()
            assert not ended & set(scheduler.request_ids)
            if not scheduler.has_work:
                assert scheduler.stats().kv_cache_usage == 0

        def teardown(self):
            if not hasattr(self, "engine"):
                return
            self.engine.drain()
            for request_id, (prompt, sampling) in self.accepted.items():
                wanted = expected_outputs(prompt, sampling, self.max_model_len)
                outputs = self.engine.outputs.get(request_id, [])
                if request_id in self.ended_early:
                    assert outputs == wanted[: len(outputs)]
                    continue
                assert outputs == wanted
                self.engine.check_routes(
                    request_id, prompt, are_wanted=sampling.return_routed_experts
                )
                if sampling.prompt_logprobs is not None:
                    entries = self.engine.prompt_logprobs[request_id]
                    assert entries[0] is None
                    assert [entry.token_id for entry in entries[1:]] == prompt[1:]
            stats = self.engine.scheduler.stats()
            assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)

    return SchedulerMachine


def test_random_lives_of_many_requests(make_engine, expected_outputs):
    run_state_machine_as_test(
        machine_type(make_engine, expected_outputs),
        settings=settings(
            max_examples=500,
            stateful_step_count=24,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
