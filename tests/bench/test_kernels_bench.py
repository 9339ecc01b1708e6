"""Kernels beside their limits: what is counted for each, and contestants that compute the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from moe_serve.bench.kernels import command
from moe_serve.bench.kernels.against import CONTESTANTS
from moe_serve.bench.kernels.cases import OPS, Case, all_cases, moe
from moe_serve.bench.kernels.rig import PlainExperts, Rig, Sizes, fitting_layers
from moe_serve.bench.kernels.rows import Row, last_cache_bytes, rows_table, time_case
from moe_serve.bench.limits import Limits, limits_table
from moe_serve.bench.ruler import Spread, difference
from moe_serve.cli import main
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu import library
from moe_serve.layers.moe import MoE
from moe_serve.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseMLPSpec,
    LayerSpec,
    MoESpec,
    RopeSpec,
)
from moe_serve.routing.router import RouterSpec, Routing

ATTENTION = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeSpec(theta=1e4, rotary_dim=8), qk_norm="head"
)
EXPERTS = MoESpec(num_experts=7, inner_size=12, router=RouterSpec(top_k=3))
SPEC = DecoderSpec(
    architecture="test",
    vocab_size=19,
    hidden_size=16,
    layers=(LayerSpec(attention=ATTENTION, mlp=EXPERTS),) * 3,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_position=64,
)
LIMITS = Limits(num_threads=1, read=1e9, copy=1e9, float32=1e9, bfloat16=4e9, int8=0.0)


@pytest.fixture(autouse=True)
def _kernels_stay_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command chooses for its process; afterwards all is as it was."""
    monkeypatch.setattr(library, "_active", library.active())


@pytest.fixture
def rig() -> Rig:
    torch.manual_seed(0)
    return Rig(SPEC, torch.float32, block_size=4, keeps_plain=True)


def case(num_bytes: float, flops: float, footprint: float = 1e9) -> Case:
    return Case(
        op="op", shape="shape", tokens=1, calls=[lambda: None], num_bytes=num_bytes, flops=flops,
        dtype=torch.bfloat16, footprint=footprint,
    )  # fmt: skip


def test_every_op_runs_for_awkward_numbers_of_tokens(rig: Rig) -> None:
    tokens = (1, 7, 17)
    with torch.inference_mode():
        cases = list(all_cases(rig, OPS, tokens, context=9, max_num_seqs=8))
        # A decode of 17 requests is more than run at once.
        assert [one.op for one in cases if one.tokens == 17] == [
            op for op in OPS if op != "attention decode"
        ]
        for one in cases:
            for call in one.calls:
                call()
            assert one.num_bytes > 0 and one.footprint > 0
            assert (one.flops > 0) == (one.op not in ("rms_norm", "attention_inputs"))


def test_only_the_ops_that_are_asked_for_are_made(rig: Rig) -> None:
    found = all_cases(rig, ["moe", "router"], [2], context=1, max_num_seqs=1)
    assert [one.op for one in found] == ["router", "moe"]


def test_what_must_be_moved_and_multiplied_is_counted(rig: Rig) -> None:
    ops = ["linear qkv", "attention decode", "attention prefill"]
    linear, decode, prefill = all_cases(rig, ops, [5], context=9, max_num_seqs=8)
    assert linear.shape == "16x64"
    assert linear.num_bytes == 4 * (16 * 64 + 5 * (16 + 64))
    assert linear.flops == 2 * 5 * 16 * 64
    # Five requests, of 9 keys and values each of two heads of 8; queries of four heads.
    assert decode.num_bytes == 4 * (5 * 9 * 2 * 16 + 2 * 5 * 32)
    assert decode.flops == 5 * 9 * 4 * 32
    # Token i sees i positions: 15 pairs.
    assert prefill.flops == 15 * 4 * 32
    assert prefill.num_bytes == 4 * (5 * 2 * 16 + 2 * 5 * 32)


def test_only_experts_that_a_token_chose_are_read(rig: Rig) -> None:
    one = moe(rig, 1)
    assert one.num_bytes == 4 * (3 * 3 * 12 * 16 + 2 * 16)
    assert one.flops == 3 * 6 * 12 * 16
    many = moe(rig, 100)
    assert many.num_bytes == 4 * (7 * 3 * 12 * 16 + 100 * 2 * 16)
    assert many.footprint == 3 * 4 * 7 * 3 * 12 * 16


@pytest.mark.parametrize("name", CONTESTANTS)
@pytest.mark.parametrize("num_tokens", [1, 7, 33])
def test_contestants_compute_what_the_layer_computes(name: str, num_tokens: int, rig: Rig) -> None:
    layer = rig.layers[1].mlp
    assert isinstance(layer, MoE)
    x_TD, routing = torch.randn(num_tokens, 16), rig.routing(num_tokens)
    # Skewed: the first expert gets most, some get none.
    ids_TK = routing.ids_TK.clone()
    ids_TK[: num_tokens // 2] = torch.tensor([0, 5, 3])
    routing = Routing(ids_TK, routing.weights_TK)
    with torch.inference_mode():
        ours = layer.path.run(x_TD, routing, layer.experts, num_tokens)
        theirs = CONTESTANTS[name](x_TD, routing, rig.plain[1], "silu")
        other = CONTESTANTS[name](
            x_TD, routing, PlainExperts(*(w + 1 for w in rig.plain[1])), "silu"
        )
    assert difference(ours, theirs) < 1e-5
    assert difference(ours, other) > 0.1


def test_sizes_replace_those_of_the_first_moe_layer() -> None:
    dense = LayerSpec(attention=ATTENTION, mlp=DenseMLPSpec(inner_size=5))
    spec = dataclasses.replace(SPEC, layers=(dense, *SPEC.layers))
    assert Sizes().apply(spec).layers == (SPEC.layers[0],) * 4
    found = Sizes(hidden=32, inner=6, experts=9, top_k=4, layers=2).apply(spec)
    (first, second) = found.moe_layers
    assert first == second
    assert (found.hidden_size, first.inner_size, first.num_experts) == (32, 6, 9)
    assert first.router.top_k == 4
    with pytest.raises(ConfigError, match="--top-k 8 is more than the 7 experts"):
        Sizes(top_k=8).apply(spec)
    with pytest.raises(ConfigError, match="it has no MoE layer"):
        Sizes().apply(dataclasses.replace(spec, layers=(dense,)))


def test_layers_are_as_many_as_memory_holds() -> None:
    layer = SPEC.num_parameters - dataclasses.replace(SPEC, layers=SPEC.layers[:2]).num_parameters
    assert fitting_layers(SPEC, 2, None) == 3
    assert fitting_layers(SPEC, 2, 4 * 2 * layer * 2) == 2
    assert fitting_layers(SPEC, 2, 4 * 2 * layer * 100) == 3
    assert fitting_layers(SPEC, 2, 0) == 1


def test_the_nearer_limit_counts() -> None:
    memory = time_case(case(num_bytes=2000.0, flops=4000.0), LIMITS, 10, 1.0)
    assert (memory.limit, memory.limit_us, memory.is_cached) == ("memory", 2.0, False)
    products = time_case(case(num_bytes=2000.0, flops=16000.0, footprint=19), LIMITS, 10, 1.0)
    assert (products.limit, products.limit_us, products.is_cached) == ("products", 4.0, False)


def test_memory_is_no_limit_to_what_is_in_the_cache() -> None:
    products = time_case(case(num_bytes=1e6, flops=4000.0, footprint=14), LIMITS, 10, 1.0)
    assert (products.limit, products.limit_us, products.is_cached) == ("products", 1.0, True)
    nothing = time_case(case(num_bytes=1e6, flops=0.0, footprint=14), LIMITS, 10, 1.0)
    assert (nothing.limit, nothing.limit_us) == ("unknown", 0.0)
    assert rows_table([nothing]).splitlines()[-1].split("|")[-2].strip() == ""


def test_rates_and_shares_follow_from_the_median() -> None:
    row = Row(
        op="op", shape="8x8", tokens=3, us=Spread(10.0, 9.0, 11.0), num_bytes=5000.0, flops=0.0,
        limit="products", limit_us=5.0, is_cached=True,
    )  # fmt: skip
    assert row.share == 0.5
    assert row.values()["gigabytes_per_second"] == 0.5
    cells = [cell.strip() for cell in rows_table([row]).splitlines()[-1].split("|")[1:-1]]
    assert cells == [
        "op", "8x8", "3", "10.0", "9.0 to 11.0", "0.5", "", "products, in cache", "50%",
    ]  # fmt: skip


def test_limits_are_told_before_and_after_and_what_is_missing_too() -> None:
    after = dataclasses.replace(LIMITS, read=2e9)
    lines = limits_table(LIMITS, after).splitlines()
    assert lines[2].split("|")[2:4] == ["         1.0 ", "         2.0 "]
    assert lines[-1].count("not offered") == 2
    assert limits_table(LIMITS).splitlines()[0].split("|")[2].strip() == "measured"


def test_limits_count_bytes_and_operations() -> None:
    now = [0]

    def clock() -> int:
        # Each look at it takes a millisecond, so that any call takes one.
        now[0] += 10**6
        return now[0]

    found = Limits.measure(num_bytes=8 * 8192 * 4, size=16, clock=clock)
    assert found.read == pytest.approx(8 * 8192 * 4 * 1e3)
    assert found.copy == pytest.approx(2 * 8 * 8192 * 4 * 1e3)
    assert found.float32 == found.bfloat16 == pytest.approx(2 * 16**3 * 1e3)
    assert found.operations(torch.float32) == found.float32


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1M", "48M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 48 << 20
    assert last_cache_bytes(tmp_path / "none") == 32 << 20


def test_the_command_prints_and_writes_times_limits_and_matches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its real sizes take seconds.
    monkeypatch.setattr(Limits, "measure", lambda: LIMITS)
    file = tmp_path / "out.json"
    argv = ["bench", "kernels", "--tokens", "3", "--ops", "moe,rms_norm", "--layers", "2",
            "--hidden", "32", "--inner", "16", "--experts", "5", "--top-k", "2",
            "--seconds", "0.001", "--against", "torch", "--pairs", "1", "--num-threads", "1",
            "--cpu-kernels", "none", "--dtype", "float32", "--output-json", str(file)]  # fmt: skip
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "32x16, 5 top-2" in printed and "loop of F.linear" in printed
    found = json.loads(file.read_text())
    assert [row["op"] for row in found["rows"]] == ["moe", "rms_norm"]
    assert found["limits"]["after"]["read"] == 1e9
    assert all(match["difference"] < 1e-5 for match in found["against"])
    assert {match["name"] for match in found["against"]} == set(CONTESTANTS)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--ops", "moo"], "--ops 'moo' is not one of linear qkv"),
        (["--tokens", "1,x"], "--tokens '1,x' must be whole numbers from 1 on"),
        (["--experts", "0"], "--experts 0 must be at least 1"),
        (["--seconds", "0"], "--seconds 0.0 must be above 0"),
        (["--layers", "99999"], "--layers 99999: the free memory holds"),
        (["--enable-eplb"], "--enable-eplb is not a flag of moe-serve bench kernels"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *argv]) == 2
    assert told in capsys.readouterr().err


def test_the_help_says_that_it_measures_the_cpu() -> None:
    assert "This measures the CPU" in command.EPILOG
