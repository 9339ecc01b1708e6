"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at the first stop string and holds back what may still become one.

    The match that is complete first wins; of several that end at the same character, the longest,
    that is the one that starts first. So the result depends on the text alone, never on its
    pieces, and generation can end the moment a stop string is complete. Example: with stops
    "abcd" and "bc", the text "abcd" is cut to "a" because "bc" is there before "d" is.

    Emitted text is never taken back: at any time the longest end of the text that begins some
    stop string is held, and not a character more.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Text that may be shown now. After a match: always "".

        With `may_match` False, stop strings completed by this piece are ignored; one that begins
        in it can still be completed by a later piece.
        """
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        for index, letter in enumerate(text):
            # Every pattern must see every letter, so no any() or early exit here.
            complete = [pattern for pattern in self._patterns if pattern.advance(letter)]
            if complete and may_match:
                stop = max((pattern.text for pattern in complete), key=len)
                return self._cut(self._held + text[: index + 1], stop)
        return self._emit(self._held + text)

    def flush(self) -> str:
        """End of the text without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _emit(self, text: str) -> str:
        num_safe = len(text) - max(pattern.num_matched for pattern in self._patterns)
        self._held = text[num_safe:]
        return text[:num_safe]

    def _cut(self, text: str, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include_in_output else text[: -len(stop)]


class _Pattern:
    """One stop string and how much of it the text ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def advance(self, letter: str) -> bool:
        """True if the text, with this letter, ends with the whole stop string."""
        num = self.num_matched
        while num and self.text[num] != letter:
            num = self._borders[num - 1]
        if self.text[num] == letter:
            num += 1
        is_complete = num == len(self.text)
        # Only a proper beginning may stay open; a complete match is reported here or ignored.
        self.num_matched = self._borders[num - 1] if is_complete else num
        return is_complete


def _borders(text: str) -> list[int]:
    """For each beginning of `text`: the length of its longest proper start that is also its end.

    >>> _borders("abab")
    [0, 0, 1, 2]
    """
    borders = [0] * len(text)
    num = 0
    for index in range(1, len(text)):
        while num and text[num] != text[index]:
            num = borders[num - 1]
        if text[num] == text[index]:
            num += 1
        borders[index] = num
    return borders
