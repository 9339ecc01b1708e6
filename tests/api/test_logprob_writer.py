"""Offsets of an echoed prompt's tokens point into the text that is echoed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_serve.api.logprobs import CompletionLogprobWriter
from moe_serve.output import LogprobEntry

PIECES = {0: b"<s>", 1: b" ab", 2: b"c", 3: "é".encode()}


def entry(token_id: int, *, is_hidden: bool = False) -> LogprobEntry:
    raw = PIECES[token_id]
    return LogprobEntry(token_id, raw.decode(), raw, -1.0, rank=1, top=[], is_hidden=is_hidden)


@pytest.mark.parametrize(
    ("token_ids", "text", "skip", "offsets"),
    [
        ([1, 2, 3], "abcé", True, [0, 2, 3]),
        ([1, 2, 3], " abcé", True, [0, 3, 4]),
        ([0, 1, 2], "abc", True, [0, 0, 2]),
        ([0, 2, 3], "<s>cé", False, [0, 3, 4]),
    ],
)
def test_offsets_point_into_the_echoed_text(
    token_ids: list[int], text: str, skip: bool, offsets: list[int]
) -> None:
    tokenizer: Any = SimpleNamespace(token_bytes=PIECES.__getitem__, special_ids={0})
    writer = CompletionLogprobWriter(tokenizer)
    entries = [None, *(entry(token_id) for token_id in token_ids[1:])]
    written = writer.write_prompt(token_ids, entries, text=text, skip_special_tokens=skip)
    assert written.text_offset == offsets
    assert writer.write([entry(2)]).text_offset == [len(text)]
