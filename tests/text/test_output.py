from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.choices import fan_out
from moe_serve.messages import RequestUpdate, TokenLogprobs
from moe_serve.output import OutputAssembler, OutputDelta, SequenceOutput
from moe_serve.sampling_params import SamplingParams
from moe_serve.token_routes import TokenRoutes

EOS, TOOL, PADDED = 256, 257, 300


class ByteVocabulary:
    """Token i is byte i; EOS is special; TOOL is text of its own; other ids are padding."""

    special_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return {EOS: b"<eos>", TOOL: b"<tool>"}.get(token_id, b"")


def assemble(**params: Any) -> OutputAssembler:
    return OutputAssembler("r", ByteVocabulary(), SamplingParams(**params), [1, 2, 3])


def update(tokens: str | list[int], finish: Any = None, **fields: Any) -> RequestUpdate:
    ids = list(tokens.encode()) if isinstance(tokens, str) else tokens
    return RequestUpdate(request_id="r", token_ids=ids, finish_reason=finish, **fields)


def position(token_id: int, *top: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token_id,
        logprob=-0.5,
        rank=2,
        top_token_ids=list(top),
        top_logprobs=[-float(i) for i in range(len(top))],
    )


def run(
    ids: list[int], sizes: list[int], finish: Any, **params: Any
) -> tuple[SequenceOutput, list[OutputDelta]]:
    """Feed `ids` in groups whose sizes repeat `sizes`, the last with the finish reason."""
    assembler = assemble(**params)
    whole, deltas, start, turn = SequenceOutput(request_id="r"), [], 0, 0
    while not assembler.is_finished:
        stop = start + sizes[turn % len(sizes)]
        reason = finish if stop >= len(ids) else None
        logprobs = [position(i) for i in ids[start:stop]]
        deltas.append(assembler.feed(update(ids[start:stop], reason, logprobs=logprobs)))
        whole.add(deltas[-1])
        start, turn = stop, turn + 1
    assert whole.num_output_tokens == assembler.num_output_tokens
    return whole, deltas


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
STOPS = st.lists(st.text(alphabet="ab世", min_size=1, max_size=3), max_size=3)
IDS = st.lists(
    st.sampled_from([*"ab世".encode(), EOS, TOOL, PADDED]) | st.integers(0, 255), max_size=16
)


@settings(max_examples=200)
@given(
    ids=IDS,
    sizes=SIZES,
    stops=STOPS,
    finish=st.sampled_from(["length", "stop", "abort"]),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_grouping_changes_nothing(
    ids: list[int],
    sizes: list[int],
    stops: list[str],
    finish: str,
    min_tokens: int,
    include: bool,
    skip: bool,
) -> None:
    params = {
        "stop": tuple(stops),
        "min_tokens": min_tokens,
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
    }
    streamed, deltas = run(ids, sizes, finish, **params)
    at_once, _ = run(ids, [len(ids) + 1], finish, **params)
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs"):
        assert getattr(streamed, name) == getattr(at_once, name)
    assert "".join(delta.text for delta in deltas) == at_once.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


@pytest.mark.parametrize("stops", [["<STOP>"], ["cd<", "d<S"], ["P"]])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 3, 99])
def test_a_stop_string_ends_text_tokens_and_count(
    stops: list[str], include: bool, size: int
) -> None:
    script = "ab cd<STOP>ef"
    before, stop = min((script.split(stop)[0], stop) for stop in stops)
    whole, deltas = run(
        list(script.encode()), [size], "length",
        stop=tuple(stops), include_stop_str_in_output=include,
    )  # fmt: skip
    assert whole.text == (before + stop if include else before)
    assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
    assert bytes(whole.token_ids).decode() == before + stop
    assert whole.logprobs is not None and len(whole.logprobs) == len(before + stop)
    assert deltas[-1].needs_abort == (size != 99)


def test_updates_after_a_stop_string_are_ignored() -> None:
    assembler = assemble(stop=("b",))
    assert assembler.feed(update("ab")).needs_abort
    late = assembler.feed(update("cd", "length"))
    assert late == OutputDelta(request_id="r")
    assert assembler.num_output_tokens == 2


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_limit_inside_a_character_ends_alike_in_both_modes(limit: int) -> None:
    ids = list("A 世b😀é".encode())[:limit]
    one_by_one, deltas = run(ids, [1], "length")
    assert (
        one_by_one.text == run(ids, [99], "length")[0].text == bytes(ids).decode(errors="replace")
    )
    assert all("\ufffd" not in delta.text for delta in deltas[:-1])


def test_a_begun_stop_string_comes_out_when_the_limit_ends_it() -> None:
    assembler = assemble(stop=("<STOP>",))
    assert assembler.feed(update("x<ST")).text == "x"
    last = assembler.feed(update("O", "length"))
    assert (last.text, last.finish_reason, last.stop_reason) == ("<STO", "length", None)
    assert not last.needs_abort


def test_the_end_token_adds_no_text_but_counts() -> None:
    for skip in (True, False):
        whole, _ = run([*b"hi", EOS], [1], "stop", skip_special_tokens=skip)
        assert whole.text == "hi"
        assert whole.token_ids == [*b"hi", EOS]


def test_a_stop_token_of_ordinary_text_shows_only_with_the_stop_included() -> None:
    for include, text in [(False, "hi"), (True, "hi<tool>")]:
        assembler = assemble(stop_token_ids=(TOOL,), include_stop_str_in_output=include)
        delta = assembler.feed(update([*b"hi", TOOL], "stop", stop_reason=TOOL))
        assert (delta.text, delta.stop_reason) == (text, TOOL)


def test_stop_strings_wait_for_min_tokens() -> None:
    whole, _ = run(list(b"a.b.c.d"), [1], "length", stop=(".",), min_tokens=3)
    assert whole.text == "a.b"
    assert whole.num_output_tokens == 4
    reached, _ = run(list(b"a.b.c.d"), [1], "length", stop=(".",), min_tokens=2)
    assert reached.text == "a"


def test_logprobs_name_bytes_alternatives_and_hidden_tokens() -> None:
    ids = [*"é".encode(), EOS]
    assembler = assemble(logprobs=2)
    delta = assembler.feed(
        update(ids, "stop", logprobs=[position(ids[0], 0xC3, 65), position(ids[1]), position(EOS)])
    )
    assert delta.logprobs is not None
    first, _, last = delta.logprobs
    assert (first.text, first.raw_bytes, first.logprob, first.rank) == ("\ufffd", b"\xc3", -0.5, 2)
    assert [(t.token_id, t.raw_bytes, t.text, t.logprob) for t in first.top] == [
        (0xC3, b"\xc3", "\ufffd", 0.0),
        (65, b"A", "A", -1.0),
    ]
    assert last.is_hidden and last.text == "<eos>"
    shown = b"".join(entry.raw_bytes for entry in delta.logprobs if not entry.is_hidden)
    assert shown.decode() == delta.text == "é"


def test_a_skipped_special_token_inside_the_text_is_hidden_in_logprobs() -> None:
    ids = [97, EOS, 98]
    for skip, text, hidden in [
        (True, "ab", [False, True, False]),
        (False, "a<eos>b", [False, False, False]),
    ]:
        whole, _ = run(ids, [2], "length", ignore_eos=True, skip_special_tokens=skip, logprobs=0)
        assert whole.text == text
        assert whole.logprobs is not None
        assert [entry.is_hidden for entry in whole.logprobs] == hidden


def test_logprobs_of_held_text_come_with_their_token() -> None:
    assembler = assemble(stop=("abc",), logprobs=0)
    delta = assembler.feed(update("ab", logprobs=[position(97), position(98)]))
    assert delta.text == ""
    assert delta.logprobs is not None and [e.text for e in delta.logprobs] == ["a", "b"]


def test_prompt_logprobs_and_cached_tokens_reach_the_whole_result() -> None:
    assembler = assemble(prompt_logprobs=0, max_tokens=0)
    whole = SequenceOutput(request_id="r")
    news = update([], "length", prompt_logprobs=[None, position(66)], num_cached_tokens=2)
    whole.add(assembler.feed(news))
    assert whole.prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None
    assert whole.prompt_logprobs[1] is not None and whole.prompt_logprobs[1].text == "B"
    assert (whole.text, whole.num_output_tokens, whole.num_cached_tokens) == ("", 0, 2)
    assert whole.logprobs is None


def test_an_error_ends_the_sequence_with_its_text_and_message() -> None:
    assembler = assemble(stop=("ab",))
    whole = SequenceOutput(request_id="r")
    whole.add(assembler.feed(update("xa")))
    whole.add(assembler.feed(update([], "error", error="out of memory")))
    assert (whole.text, whole.finish_reason, whole.error) == ("xa", "error", "out of memory")
    assert whole.finish_reason is not None


def test_choices_get_ids_and_random_streams_of_their_own() -> None:
    choices = fan_out("cmpl-1", SamplingParams(n=3, seed=11))
    assert [c.index for c in choices] == [0, 1, 2]
    assert [c.request_id for c in choices] == ["cmpl-1-0", "cmpl-1-1", "cmpl-1-2"]
    assert len({c.params.seed for c in choices}) == 3
    assert {c.params.n for c in choices} == {1}
    assert fan_out("cmpl-1", SamplingParams(n=3, seed=11)) == choices


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1),
    stop=st.sampled_from(["", "cd", "h"]),
    max_tokens=st.integers(1, 12),
)
def test_routes_end_with_the_last_token_but_one(
    sizes: list[int], stop: str, max_tokens: int
) -> None:
    """However many tokens an update brings, and wherever in it a stop string is complete."""
    assembler = assemble(stop=(stop,) if stop else ())
    whole = SequenceOutput(request_id="r")
    assert whole.routed_experts is None
    ids_TLK = np.arange(6 * 20, dtype=np.int16).reshape(20, 3, 2)
    text, turn, num_told = "abcdefghijkl"[:max_tokens], 0, 0
    while not assembler.is_finished:
        part, text = text[: sizes[turn % len(sizes)]], text[sizes[turn % len(sizes)] :]
        # The prompt has 3 tokens.
        num_computed = 3 + max_tokens - len(text) - 1
        routes = TokenRoutes.of(ids_TLK[num_told:num_computed])
        reason = None if text else "length"
        whole.add(assembler.feed(update(part, reason, routes=routes)))
        turn, num_told = turn + 1, num_computed
    told = whole.routed_experts
    assert told is not None and told.flags.writeable
    assert np.array_equal(told, ids_TLK[: 3 + whole.num_output_tokens - 1])
