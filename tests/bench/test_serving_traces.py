from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from moe_serve.bench.serving.traces import TraceCut, TraceRow, read_trace
from moe_serve.errors import ConfigError

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def mooncake(**fields: Any) -> str:
    return json.dumps({"timestamp": 1500, "input_length": 600, "output_length": 7, **fields})


def test_azure_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", HEADER, "2023-11-16 18:15:46.6805900,374,44", "",
        "2023-11-16 18:15:50.1805900,0,0",
    )  # fmt: skip
    first, second = read_trace(path)
    assert (first.input_len, first.output_len, first.hash_ids) == (374, 44, ())
    assert second.seconds - first.seconds == pytest.approx(3.5, abs=1e-5)
    assert (second.input_len, second.output_len) == (0, 1)


def test_azure_times_may_have_a_zone(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", HEADER, "2024-05-10 00:00:00+00:00,1,1", "2024-05-10 02:00:01+02:00,1,1"
    )
    first, second = read_trace(path)
    assert second.seconds - first.seconds == 1.0


def test_mooncake_rows_packed_or_not(tmp_path: Path) -> None:
    lines = [mooncake(hash_ids=[0, 14]), mooncake(timestamp=0)]
    plain = read_trace(write(tmp_path / "m.jsonl", *lines))
    assert plain == [
        TraceRow(seconds=1.5, input_len=600, output_len=7, hash_ids=(0, 14)),
        TraceRow(seconds=0.0, input_len=600, output_len=7),
    ]
    packed = tmp_path / "m.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert read_trace(str(packed)) == plain


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER, "2023-11-16 18:15:46,374,44", "noon,1,1"], "line 3: Invalid isoformat"),
        ([HEADER, "2023-11-16 18:15:46,x,44"], "line 2: invalid literal"),
        ([HEADER, "2023-11-16 18:15:46,-1,44"], "line 2: ContextTokens -1 must be"),
        ([HEADER, "2023-11-16 18:15:46,1"], "line 2: has 2 of the 3 columns"),
        ([HEADER], "no request"),
        (["a,b,c", "1,2,3"], "line 1 is neither the header TIMESTAMP,"),
        ([mooncake(), "", "{"], "line 3: "),
        (['{"timestamp": 1}'], "line 1: has no 'input_length'"),
        ([mooncake(), "[1]"], "line 2: is no JSON object"),
        ([mooncake(timestamp=-1)], "line 1: timestamp -1 must be"),
        ([mooncake(output_length=1.5)], "line 1: output_length 1.5 must be"),
        ([mooncake(hash_ids=["a"])], "line 1: hash_ids must be"),
        ([""], "line 1 is neither"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write(tmp_path / "trace", *lines)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert str(error.value).startswith(path) and message in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(str(tmp_path / "none.csv"))
    broken = tmp_path / "a.gz"
    broken.write_bytes(gzip.compress(b"x" * 1000)[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(broken))


def row(seconds: float, input_len: int, output_len: int = 1, *hash_ids: int) -> TraceRow:
    return TraceRow(seconds=seconds, input_len=input_len, output_len=output_len, hash_ids=hash_ids)


def test_rows_start_at_zero_in_order_and_faster() -> None:
    kept = TraceCut(speed=4).apply([row(9, 5), row(1, 7), row(3, 0)])
    assert [(each.seconds, each.input_len) for each in kept.rows] == [(0, 7), (0.5, 1), (2, 5)]


def test_long_rows_are_left_out_and_do_not_count() -> None:
    rows = [row(0, 10, 7), row(1, 5), row(2, 11), row(3, 4), row(4, 99)]
    kept = TraceCut(max_rows=2, max_len=12).apply(rows)
    assert [each.input_len for each in kept.rows] == [5, 11]
    assert kept.num_left_out == 1
    assert len(TraceCut(max_seconds=3).apply(rows).rows) == 3


def test_lengths_and_blocks_shrink_together() -> None:
    cut = TraceCut(scale=0.125)
    assert cut.block_tokens == 64
    (kept,) = cut.apply([row(0, 1025, 17, 5, 6, 7)]).rows
    # 128 tokens are two blocks: the third, of one token, is rounded away.
    assert (kept.input_len, kept.output_len, kept.hash_ids) == (128, 2, (5, 6))


@pytest.mark.parametrize(
    ("name", "num_rows", "mean_input", "has_blocks"),
    [
        ("azure_llm_2023_conv.csv", 6000, 1151, False),
        ("azure_llm_2023_code.csv", 6000, 2027, False),
        ("mooncake_synthetic.jsonl.gz", 3993, None, True),
        ("mooncake_conversation.jsonl.gz", 4000, None, True),
    ],
)
def test_published_traces(
    name: str, num_rows: int, mean_input: int | None, has_blocks: bool
) -> None:
    if not TRACES.exists():
        pytest.skip("needs the published traces")
    rows = read_trace(str(TRACES / name))
    assert len(rows) == num_rows
    if mean_input is not None:
        assert sum(each.input_len for each in rows) / len(rows) == pytest.approx(
            mean_input, rel=0.01
        )
    for each in rows if has_blocks else []:
        assert len(each.hash_ids) == -(-each.input_len // 512)
