from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

import moe_serve.builtin
from moe_serve.bench.serving.bodies import Planned, Wording
from moe_serve.bench.serving.loads import Given, Load, Synthetic
from moe_serve.bench.serving.material import (
    Material,
    from_tokenizer,
    ids_below,
    ids_seen,
    probe_text,
    words,
)
from moe_serve.bench.serving.prompts import (
    Lengths,
    Prompt,
    from_trace,
    read_prompts,
    synthetic,
)
from moe_serve.bench.serving.traces import TraceRow
from moe_serve.errors import ConfigError

MANY = ids_below(100_000)


def made(lengths: Lengths, num: int, seed: int = 0, draw: int = 1, **fields: Any) -> list[Prompt]:
    options = {"material": MANY, "is_text": False, **fields}
    material = options.pop("material")
    return list(synthetic(material, lengths, num, seed=seed, draw=draw, **options))


@given(
    input_len=st.integers(1, 50),
    output_len=st.integers(1, 50),
    ratio=st.floats(0, 0.99),
    prefix=st.integers(0, 9),
    seed=st.integers(0, 2**33),
)
def test_lengths_lie_in_the_range(
    input_len: int, output_len: int, ratio: float, prefix: int, seed: int
) -> None:
    lengths = Lengths(
        input_len=input_len, output_len=output_len, range_ratio=ratio, shared_prefix_len=prefix
    )
    for prompt in made(lengths, 7, seed):
        assert isinstance(prompt.content, list)
        assert len(prompt.content) == prompt.num_tokens
        own = prompt.num_tokens - prefix
        assert max(1, input_len * (1 - ratio) - 1) <= own <= input_len * (1 + ratio) + 1
        assert max(1, output_len * (1 - ratio) - 1) <= prompt.max_tokens
        assert prompt.max_tokens <= output_len * (1 + ratio) + 1


def test_another_draw_has_the_same_lengths_and_nothing_else_in_common() -> None:
    lengths = Lengths(input_len=40, output_len=9, range_ratio=0.5, shared_prefix_len=3)
    first, second = made(lengths, 17, draw=1), made(lengths, 17, draw=2)
    assert first == made(lengths, 17, draw=1)
    for one, other in zip(first, second, strict=True):
        assert (one.num_tokens, one.max_tokens) == (other.num_tokens, other.max_tokens)
        assert one.content[0] != other.content[0]
    assert len({tuple(prompt.content[:3]) for prompt in first}) == 1  # type: ignore[arg-type]
    assert len({prompt.content[3] for prompt in first}) > 10  # type: ignore[type-var]


def test_rows_of_a_trace_share_what_their_blocks_share() -> None:
    rows = [
        TraceRow(seconds=0, input_len=20, output_len=3, hash_ids=(4, -7, 10**30)),
        TraceRow(seconds=1, input_len=17, output_len=2, hash_ids=(4, -7, 5)),
        TraceRow(seconds=2, input_len=11, output_len=1),
    ]
    first, second, third = from_trace(MANY, rows, 8, seed=0, draw=1, is_text=False)
    assert [each.num_tokens for each in (first, second, third)] == [20, 17, 11]
    assert first.content[:16] == second.content[:16]
    assert first.content[16] != second.content[16]
    assert third.content[:8] != first.content[:8]
    assert [each.max_tokens for each in (first, second, third)] == [3, 2, 1]
    (other, *_) = from_trace(MANY, rows, 8, seed=0, draw=2, is_text=False)
    assert other.content[:8] != first.content[:8]


def test_a_row_with_too_few_blocks_is_filled_up() -> None:
    rows = [TraceRow(seconds=0, input_len=20, output_len=3, hash_ids=(4,))] * 2
    first, second = from_trace(MANY, rows, 8, seed=0, draw=1, is_text=False)
    assert len(first.content) == 20 and first.content[:8] == second.content[:8]
    assert first.content[8:] != second.content[8:]


def drawn(material: Material) -> set[int]:
    return set(material.draw(np.random.default_rng(0), 5000))


def test_ids_are_ordinary_ones(tmp_path: Path) -> None:
    assert min(drawn(ids_below(1000))) == 300 and max(drawn(ids_below(1000))) == 999
    assert drawn(ids_below(7)) == {3, 4, 5, 6}
    assert drawn(ids_seen([9, 2, 9, 5])) == {2, 5, 9}
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert drawn(from_tokenizer(str(path))) == {1, 2, 3}
    assert from_tokenizer(str(tmp_path)).to_text([3, 1]) == "c a"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="--tokenizer .*tokenizer.json cannot be read"):
        from_tokenizer(str(tmp_path))


def test_text_of_a_tokenizer_has_as_many_tokens() -> None:
    path = Path(moe_serve.builtin.__path__[0], "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    lengths = Lengths(input_len=60, output_len=1, shared_prefix_len=40)
    prompts = made(lengths, 17, material=from_tokenizer(str(path)), is_text=True)
    texts = [str(prompt.content) for prompt in prompts]
    assert len({text[:60] for text in texts}) == 1 and len(set(texts)) == 17
    cut = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    assert 97 < sum(cut) / 17 < 101 and max(cut) <= 104


def test_words_and_probes_are_text() -> None:
    (prompt,) = made(Lengths(input_len=17, output_len=1), 1, material=words(), is_text=True)
    assert isinstance(prompt.content, str) and len(prompt.content.split()) == 17
    assert len(probe_text(0, 300)) == 300 and len(set(probe_text(0, 300))) > 40


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hé"}]
    path = write(tmp_path / "p", {"prompt": "a", "max_tokens": 3}, "", {"prompt": [5, 6]},
                 {"messages": messages})  # fmt: skip
    assert read_prompts(path, 9) == [
        Prompt(content="a", max_tokens=3),
        Prompt(content=[5, 6], max_tokens=9, num_tokens=2),
        Prompt(content=messages, max_tokens=9),
    ]
    assert [each.content for each in read_prompts(write(tmp_path / "t", "x y", "", "z"), 1)] == [
        "x y", "z",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ([1], "is no JSON object"),
        ({}, 'either "prompt" or "messages"'),
        ({"prompt": "a", "messages": []}, 'either "prompt" or "messages"'),
        ({"prompt": ""}, '"prompt" must be text or'),
        ({"prompt": [1, "a"]}, '"prompt" must be text or'),
        ({"messages": ["a"]}, '"messages" must be'),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0 must be"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "p", {"prompt": "a"}, line)
    with pytest.raises(ConfigError, match=f"--prompts {path}: line 2: .*{message}"):
        read_prompts(path, 1)


def test_no_prompt_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no prompt in it"):
        read_prompts(write(tmp_path / "p", "", " "), 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(str(tmp_path / "none"), 1)


def test_a_request_says_what_was_asked_for() -> None:
    prompt = Prompt(content=[5, 6], max_tokens=7, num_tokens=2)
    assert json.loads(Wording().body("m", prompt)) == {
        "model": "m", "prompt": [5, 6], "max_tokens": 7, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    extra = {"temperature": 0.5, "top_k": 3}
    body = json.loads(Wording(ignore_eos=False, extra=extra).body("m", prompt))
    assert "ignore_eos" not in body and body["temperature"] == 0.5 and body["top_k"] == 3


def test_chat_takes_text_and_messages_alone() -> None:
    chat = Wording(endpoint="chat")
    messages: Any = [{"role": "user", "content": "a"}]
    for content in ("a", messages):
        body = json.loads(chat.body("m", Prompt(content=content, max_tokens=1)))
        assert body["messages"] == messages and "prompt" not in body
    with pytest.raises(ConfigError, match="no token ids"):
        chat.body("m", Prompt(content=[1], max_tokens=1))
    with pytest.raises(ConfigError, match="need --endpoint chat"):
        Wording().body("m", Prompt(content=messages, max_tokens=1))


def contents(requests: list[Planned]) -> list[Any]:
    return [json.loads(each.body)["prompt"] for each in requests]


def test_a_load_has_each_prompt_at_its_time() -> None:
    lengths = Lengths(input_len=5, output_len=1)
    source = Synthetic(material=MANY, lengths=lengths, num_prompts=3, seed=0, is_text=False)
    load = Load(source=source, due=[0.0, 0.5, 2.0], wording=Wording())
    requests = load.requests(1, "m")
    assert [(each.due, each.num_input, each.num_wanted) for each in requests] == [
        (0.0, 5, 1), (0.5, 5, 1), (2.0, 5, 1),
    ]  # fmt: skip
    assert contents(requests) == [each.content for each in source.prompts(1)]
    warmup = load.warmup(2, "m")
    assert [each.due for each in warmup] == [0.0, 0.0]
    assert not {tuple(each) for each in contents(warmup)} & {tuple(e) for e in contents(requests)}


def test_a_file_begins_again_where_it_is_too_short() -> None:
    given_ = Given(from_file=[Prompt(content=c, max_tokens=1) for c in "ab"], num_prompts=5)
    assert [each.content for each in given_.prompts(1)] == [*"ababa"]
