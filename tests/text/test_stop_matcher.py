from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.stop_matcher import StopMatcher

TEXT = "ab cd<STOP>ef"
LETTERS = st.text(alphabet="ab<", max_size=24)
STOPS = st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4)


def oracle(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """By searching every beginning of the text: the shortest one that ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> str:
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.flush()


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start, turn = [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[start : start + size])
        start, turn = start + size, turn + 1
    return pieces


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@settings(max_examples=300)
@given(text=LETTERS, stops=STOPS, sizes=SIZES, include=st.booleans())
def test_any_pieces_give_what_a_search_of_the_whole_text_gives(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include_in_output=include)
    expected, stop = oracle(text, stops, include=include)
    assert run(matcher, cut(text, sizes)) == expected
    assert matcher.matched == stop


@settings(max_examples=300)
@given(text=LETTERS, later=LETTERS, stops=STOPS, sizes=SIZES)
def test_shown_text_never_has_to_be_taken_back_and_no_more_is_held_than_needed(
    text: str, later: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in cut(text, sizes))
    assert oracle(text + later, stops, include=False)[0].startswith(shown)
    if matcher.matched is None:
        held = text[len(shown) :]
        begun = [stop[:n] for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert held == max(begun, key=len, default="")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stops", "before", "stop"),
    [
        (["<STOP>"], "ab cd", "<STOP>"),
        (["cd<", "d<S"], "ab ", "cd<"),
        (["d<S", "cd<"], "ab ", "cd<"),
        (["P"], "ab cd<STO", "P"),
        (["ef"], "ab cd<STOP>", "ef"),
        (["ab cd<STOP>ef"], "", "ab cd<STOP>ef"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_text_is_cut_at_the_stop_string_in_any_mode(
    stops: list[str], before: str, stop: str, include: bool, size: int
) -> None:
    matcher = StopMatcher(stops, include_in_output=include)
    assert run(matcher, cut(TEXT, [size])) == (before + stop if include else before)
    assert matcher.matched == stop


def test_the_match_that_is_complete_first_wins_over_one_that_began_earlier() -> None:
    for size in (1, 4):
        matcher = StopMatcher(["abcd", "bc"])
        assert run(matcher, cut("abcd", [size])) == "a"
        assert matcher.matched == "bc"


def test_of_two_that_end_together_the_longer_one_is_cut() -> None:
    matcher = StopMatcher(["c", "abc"])
    assert run(matcher, ["xabc"]) == "x"
    assert matcher.matched == "abc"


def test_nothing_comes_after_the_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.feed("abc") == "a"
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""


def test_an_unfinished_beginning_is_shown_when_the_text_ends() -> None:
    matcher = StopMatcher(["<STOP>"])
    assert matcher.feed("x<STO") == "x"
    assert matcher.flush() == "<STO"
    assert matcher.matched is None


def test_text_after_a_false_start_is_not_lost() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.feed(letter) for letter in "aaab"] == ["", "", "a", ""]
    assert matcher.matched == "aab"


def test_matches_that_may_not_count_are_shown_and_later_ones_found() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.feed("xaba", may_match=False) == "xab"
    assert matcher.feed("ba") == ""
    assert matcher.matched == "aba"


def test_without_stop_strings_text_passes() -> None:
    matcher = StopMatcher([])
    assert (matcher.feed("abc"), matcher.flush(), matcher.matched) == ("abc", "", None)
