from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from moe_serve.cli.generate import GenerateConfig
from moe_serve.config import EngineConfig, ServeConfig
from moe_serve.errors import ConfigError
from moe_serve.option_parser import ELSEWHERE
from moe_serve.options import options_of
from moe_serve.settings import parse

ENGINE_FLAGS = """
    --config --revision --dtype --device --max-model-len --max-num-seqs
    --max-num-batched-tokens --chunked-prefill-size --block-size --gpu-memory-utilization
    --[no-]enforce-eager --kv-cache-dtype --kv-cache-memory --num-kv-blocks
    --num-gpu-blocks-override --[no-]enable-prefix-caching --max-logprobs --num-threads
    --cpu-kernels --quantization --tensor-parallel-size --tp --data-parallel-size --dp
    --[no-]enable-expert-parallel --all2all-backend --comm-backend --expert-placement-strategy
    --ep-num-redundant-experts --init-expert-location --[no-]enable-eplb --eplb-config
    --expert-record-dir --[no-]deterministic --collective-timeout --help
""".split()
SERVE_FLAGS = """
    --host --port --served-model-name --api-key --admin-api-key --chat-template --shutdown-timeout
    --step-timeout --max-body-bytes --max-queue-len --max-choices --metrics-prefix --log-level
""".split()
GENERATE_FLAGS = """
    --prompt --max-tokens --temperature --top-p --top-k --min-p --seed --[no-]ignore-eos
""".split()


def serve(*argv: str) -> ServeConfig:
    return parse(ServeConfig, argv, prog="moe-serve serve", other_types=[GenerateConfig])


def generate(*argv: str) -> GenerateConfig:
    return parse(GenerateConfig, argv, prog="moe-serve generate", other_types=[ServeConfig])


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def help_of(config_type: type[EngineConfig], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(config_type, ["--help"], prog="moe-serve x")
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_without_any_source_every_option_has_its_default() -> None:
    assert serve() == ServeConfig()
    assert generate() == GenerateConfig()


def test_flag_beats_environment_beats_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "s.yaml", "port: 1\nhost: from-file\nmax_num_seqs: 3\n")
    monkeypatch.setenv("MOE_SERVE_PORT", "2")
    monkeypatch.setenv("MOE_SERVE_HOST", "from-environment")
    config = serve("--config", file, "--port", "7")
    assert (config.port, config.host, config.max_num_seqs) == (7, "from-environment", 3)
    assert config.block_size == ServeConfig().block_size


def test_precedence_holds_across_the_spellings_of_one_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "s.yaml", "max_num_batched_tokens: 101\n")
    monkeypatch.setenv("MOE_SERVE_CHUNKED_PREFILL_SIZE", "102")
    assert serve("--config", file).max_num_batched_tokens == 102
    assert serve("--config", file, "--chunked-prefill-size", "103").max_num_batched_tokens == 103
    monkeypatch.delenv("MOE_SERVE_CHUNKED_PREFILL_SIZE")
    monkeypatch.setenv("MOE_SERVE_MAX_NUM_BATCHED_TOKENS", "104")
    file = write(tmp_path / "t.yaml", "chunked_prefill_size: 105\n")
    assert serve("--config", file).max_num_batched_tokens == 104


ALIASES = [
    (option.name, alias) for option in options_of(ServeConfig).values() for alias in option.aliases
]


@pytest.mark.parametrize(("name", "alias"), ALIASES)
def test_an_alias_is_a_flag_a_variable_and_a_yaml_key(
    name: str, alias: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert getattr(serve("--" + alias.replace("_", "-"), "129"), name) == 129
    file = write(tmp_path / "s.yaml", f"{alias}: 17\n")
    assert getattr(serve("--config", file), name) == 17
    monkeypatch.setenv("MOE_SERVE_" + alias.upper(), "300")
    assert getattr(serve(), name) == 300


@pytest.mark.parametrize(
    "argv", [("-tp", "2", "-dp", "4"), ("-tp=2", "-dp=4"), ("--tp", "2", "--dp", "4")]
)
def test_degrees_go_by_the_short_names_of_other_engines(argv: tuple[str, ...]) -> None:
    assert serve(*argv) == ServeConfig(tensor_parallel_size=2, data_parallel_size=4)


def test_parallel_options_come_from_every_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = ServeConfig(
        tensor_parallel_size=2,
        data_parallel_size=3,
        enable_expert_parallel=True,
        all2all_backend="all_to_all",
        expert_placement_strategy="round_robin",
        deterministic=True,
        collective_timeout=7.5,
    )
    given = {"tp": "2", "data_parallel_size": "3", "all2all_backend": "all_to_all",
             "expert_placement_strategy": "round_robin", "collective_timeout": "7.5"}  # fmt: skip
    switches = {"enable_expert_parallel": "true", "deterministic": "true"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    flags += [f"--{name.replace('_', '-')}" for name in switches]
    assert serve(*flags) == expected
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in (given | switches).items()]
    assert serve("--config", write(tmp_path / "s.yaml", "\n".join(lines))) == expected
    for name, value in (given | switches).items():
        monkeypatch.setenv("MOE_SERVE_" + name.upper(), value)
    assert serve() == expected


def test_the_model_is_positional_and_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve().model == "builtin"
    assert serve("./folder", "--port", "1").model == "./folder"
    assert serve("--port", "1", "./folder").model == "./folder"
    monkeypatch.setenv("MOE_SERVE_MODEL", "other")
    assert serve().model == "other"
    assert serve("./folder").model == "./folder"


@pytest.mark.parametrize("argv", [("--served-model-name", "x"), ("--served-model-name=x",)])
def test_a_value_follows_a_space_or_an_equals_sign(argv: tuple[str, ...]) -> None:
    assert serve(*argv).served_model_name == "x"


def test_a_flag_given_twice_counts_once_the_last() -> None:
    assert serve("--port", "1", "--port", "2").port == 2
    assert serve("--chunked-prefill-size=7", "--max-num-batched-tokens=9") == ServeConfig(
        max_num_batched_tokens=9
    )


def test_a_switch_turns_on_and_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert serve("--no-enable-prefix-caching").enable_prefix_caching is False
    file = write(tmp_path / "s.yaml", "enable-prefix-caching: false\n")
    assert serve("--config", file).enable_prefix_caching is False
    monkeypatch.setenv("MOE_SERVE_ENABLE_PREFIX_CACHING", "0")
    assert serve().enable_prefix_caching is False
    assert serve("--enable-prefix-caching").enable_prefix_caching is True


def test_the_file_may_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOE_SERVE_CONFIG", write(tmp_path / "s.yaml", "max-num-seqs: 5\n"))
    assert serve().max_num_seqs == 5
    other = write(tmp_path / "t.yaml", "max-num-seqs: 6\n")
    assert serve("--config", other).max_num_seqs == 6


def test_an_empty_file_and_a_null_change_nothing(tmp_path: Path) -> None:
    assert serve("--config", write(tmp_path / "s.yaml", "# nothing\n")) == ServeConfig()
    assert serve("--config", write(tmp_path / "t.yaml", "revision: null\n")) == ServeConfig()


def test_no_word_on_the_command_line_stands_for_none() -> None:
    config = serve("--api-key", "None", "--revision", "null")
    assert (config.api_key, config.revision) == ("None", "null")


def test_repeated_prompts_are_kept_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = ("a, b", '["c"]', "{d", "", '"e" \\n', "- f\n")
    argv = [f"--prompt={text}" for text in texts]
    assert generate(*argv).prompt == texts
    file = write(tmp_path / "g.yaml", "prompt: ['a, b', c]\n")
    assert generate("--config", file).prompt == ("a, b", "c")
    monkeypatch.setenv("MOE_SERVE_PROMPT", '["x, y"]')
    assert generate().prompt == ("x, y",)


def test_negative_numbers_are_values() -> None:
    assert generate("--top-k", "-1", "--seed", "-5").seed == -5


def test_a_variable_of_another_command_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_PORT", "not a port")
    assert generate() == GenerateConfig()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "--prot is not a flag of moe-serve serve; did you mean --port?"),
        (["--prot=1"], "--prot is not a flag of moe-serve serve; did you mean --port?"),
        (["--max_num_seq", "1"], "did you mean --max-num-seqs?"),
        (["--max-num-b", "1"], "--max-num-b is not a flag"),  # no abbreviations
        (["--tp-size", "2"], "--tp-size is not a flag of moe-serve serve; write --tensor-parallel"),
        (["-ep", "2"], "--ep is not a flag of moe-serve serve; --enable-expert-parallel spreads"),
        (["-t", "2"], "-t is not a flag of moe-serve serve"),  # no abbreviation of -tp
        (["-tp2"], "-tp2 is not a flag of moe-serve serve"),
        (["-tp"], "needs a value"),
        (["-tp", "0"], "--tensor-parallel-size 0 must be at least 1"),
        (["--dp=-1"], "--data-parallel-size -1 must be at least 1"),
        (["--tp", "all"], "--tensor-parallel-size all must be a whole number"),
        (["--enable-expert-parallel", "--all2all-backend", "all2all"],
         "--all2all-backend all2all must be one of auto, allgather_reducescatter, all_to_all; did"),
        (["--all2all-backend", "all_to_all"],
         "--all2all-backend all_to_all has no effect without expert parallelism; add --enable-ex"),
        (["--expert-placement-strategy", "round_robin", "--no-enable-expert-parallel"],
         "--expert-placement-strategy round_robin has no effect without expert parallelism"),
        (["--collective-timeout", "0.5"], "--collective-timeout 0.5 must be between 1 and 86400"),
        (["--collective-timeout", "inf"], "--collective-timeout inf must be between 1 and 86400"),
        (["--collective-timeout", "nan"], "--collective-timeout nan must be between 1 and 86400"),
        (["--enable-metrics"], "metrics are always on, at /metrics"),
        (["--model", "m"], "give the model without a flag: moe-serve serve MODEL"),
        (["--xyzzy"], "--xyzzy is not a flag of moe-serve serve; see moe-serve serve --help"),
        (["--model", "x"], "give the model without a flag: moe-serve serve MODEL"),
        (["--port"], "--port needs a value"),
        (["--port", "abc"], "--port abc must be a whole number"),
        (["--port", "1.5"], "--port 1.5 must be a whole number"),
        (["--port", "70000"], "--port 70000 must be between 0 and 65535"),
        (["--shutdown-timeout", "soon"], "--shutdown-timeout soon must be a number"),
        (["--dtype", "bfloat"], "--dtype bfloat must be one of auto, float32, bfloat16, float16"
                                "; did you mean bfloat16?"),
        (["--enable-prefix-caching=no"], "takes no value, but got 'no'"),
        (["--api-key", ""], "--api-key is empty; give a value or leave it out"),
        (["a", "b"], "'b' is one argument too many"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: there is no such file"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_named_with_what_is_allowed(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        serve(*argv)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PROT": "1"}, "MOE_SERVE_PROT is set but names no option; did you mean MOE_SERVE_PORT?"),
        ({"XYZZY": "1"}, "MOE_SERVE_XYZZY is set but names no option"),
        ({"PORT": "abc"}, "MOE_SERVE_PORT abc must be a whole number"),
        ({"PORT": "70000"}, "MOE_SERVE_PORT 70000 must be between 0 and 65535"),
        ({"API_KEY": ""}, "MOE_SERVE_API_KEY is empty; give a value or leave it out"),
        ({"ENABLE_PREFIX_CACHING": "maybe"}, "maybe must be true or false"),
        ({"CHUNKED_PREFILL_SIZE": "0"}, "MOE_SERVE_CHUNKED_PREFILL_SIZE 0 must be at least 1"),
        ({"NUM_KV_BLOCKS": "1", "NUM_GPU_BLOCKS_OVERRIDE": "1"},
         "MOE_SERVE_NUM_KV_BLOCKS and MOE_SERVE_NUM_GPU_BLOCKS_OVERRIDE are one option"),
        ({"NUM_KV_BLOCKS": "1", "KV_CACHE_MEMORY": "1g"},
         "MOE_SERVE_NUM_KV_BLOCKS and MOE_SERVE_KV_CACHE_MEMORY both size the KV pool"),
        ({"TP": "0"}, "MOE_SERVE_TP 0 must be at least 1"),
        ({"TP": "2", "TENSOR_PARALLEL_SIZE": "2"},
         "MOE_SERVE_TENSOR_PARALLEL_SIZE and MOE_SERVE_TP are one option"),
        ({"ALL2ALL_BACKEND": "all_to_all"},
         "MOE_SERVE_ALL2ALL_BACKEND all_to_all has no effect without expert parallelism"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named_with_what_is_allowed(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv("MOE_SERVE_" + name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        serve()


def test_a_list_in_a_variable_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_PROMPT", "hello")
    message = 'MOE_SERVE_PROMPT hello must be a list, as ["a", "b"]'
    with pytest.raises(ConfigError, match=re.escape(message)):
        generate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "s.yaml: prot is not an option; did you mean port?"),
        ("config: other.yaml", "s.yaml: config is not an option"),
        ("port: abc", "s.yaml: port abc must be a whole number"),
        ("port: yes", "s.yaml: port True must be a whole number"),
        ("port:", "s.yaml: port None must be a whole number"),
        ("max-num-seqs: 0", "s.yaml: max_num_seqs 0 must be at least 1"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "a key is there twice"),
        ("num_kv_blocks: 1\nnum_gpu_blocks_override: 2", "are one option"),
        ("tp: 2\ntensor-parallel-size: 2", "are one option"),
        ("dp: 1.5", "s.yaml: dp 1.5 must be a whole number"),
        ("host: ''", "s.yaml: host is empty"),
        ("- port", "must hold lines such as `port: 9000`"),
        ("port 9000", "must hold lines such as `port: 9000`"),
        ("port: [1", "s.yaml cannot be read: while parsing"),
    ],
)
def test_a_wrong_line_in_the_file_is_named_with_what_is_allowed(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        serve("--config", write(tmp_path / "s.yaml", text))
    assert "\n" not in str(error.value)


def test_a_key_of_the_wrong_type_is_not_repeated_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key must be text; write it in quotes") as error:
        serve("--config", write(tmp_path / "s.yaml", "api_key: 20401"))
    assert "20401" not in str(error.value)


@pytest.mark.parametrize(
    ("config_type", "flags"),
    [
        (EngineConfig, ENGINE_FLAGS),
        (ServeConfig, ENGINE_FLAGS + SERVE_FLAGS),
        (GenerateConfig, ENGINE_FLAGS + GENERATE_FLAGS),
    ],
)
def test_the_flags_are_exactly_these(
    config_type: Any, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = help_of(config_type, capsys).splitlines()
    heads = [line[:60].split("   ")[0] for line in lines if re.match(r"  -", line)]
    shown = [flag for head in heads for flag in re.findall(r"--[a-z\[][a-z0-9\]-]*", head)]
    assert sorted(shown) == sorted(flags)


def test_help_shows_every_option_grouped_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(ServeConfig, capsys)
    flat = " ".join(text.split())
    assert text.index("engine options:") < text.index("--dtype") < text.index("serve options:")
    assert text.index("serve options:") < text.index("--port N")
    assert max(map(len, text.splitlines())) <= 100
    for field in dataclasses.fields(ServeConfig):
        assert field.metadata["help"] in flat
        if isinstance(field.default, int | float | str) and not isinstance(field.default, bool):
            assert f"[{field.default}]" in flat
    assert "reuse the KV blocks of equal prompt prefixes [on]" in flat


def test_variables_of_a_service_link_are_not_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MOE_SERVE_SERVICE_HOST": "10.0.0.7",
        "MOE_SERVE_SERVICE_PORT": "80",
        "MOE_SERVE_SERVICE_PORT_HTTP": "80",
        "MOE_SERVE_PORT": "tcp://10.0.0.7:80",
        "MOE_SERVE_PORT_80_TCP": "tcp://10.0.0.7:80",
        "MOE_SERVE_PORT_80_TCP_ADDR": "10.0.0.7",
    }.items():
        monkeypatch.setenv(name, value)
    assert serve().port == 8000
    monkeypatch.setenv("MOE_SERVE_PORT", "9000")
    assert serve().port == 9000


@pytest.mark.parametrize("config_type", [ServeConfig, GenerateConfig])
def test_advice_for_other_engines_flags_names_none_of_ours(config_type: type[EngineConfig]) -> None:
    ours = {
        f"--{s.replace('_', '-')}" for o in options_of(config_type).values() for s in o.spellings
    }
    # MODEL is an option without a flag.
    foreign = (
        set(ELSEWHERE) - {"--model"} - ({"--seed"} if config_type is GenerateConfig else set())
    )
    assert not ours & foreign
