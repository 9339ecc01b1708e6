"""--eplb-config, and how the options of experts go together."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from moe_serve.config import EngineConfig, ServeConfig
from moe_serve.eplb_config import EplbConfig
from moe_serve.errors import ConfigError


def test_the_defaults_are_those_of_vllm() -> None:
    config = EplbConfig.parse(None)
    assert config == EplbConfig.parse("{}") == EplbConfig()
    keys = "window_size step_interval num_redundant_experts log_balancedness use_async policy"
    assert [getattr(config, key) for key in keys.split()] == [1000, 3000, 0, False, True, "default"]


def test_every_key_is_read() -> None:
    given: dict[str, Any] = {
        "window_size": 7, "step_interval": 0, "num_redundant_experts": 17, "use_async": False,
        "policy": "default", "log_balancedness": True, "log_balancedness_interval": 3,
        "max_moves": 0, "min_gain": -1, "num_nodes": 2, "num_groups": 6, "cover_rank_loss": True,
        "transfer_timeout": 0.5, "staging_mib": 1,
    }  # fmt: skip
    config = EplbConfig.parse(json.dumps(given))
    assert {key: getattr(config, key) for key in given} == given
    assert set(given) == set(EplbConfig.__dataclass_fields__)
    assert EplbConfig.parse('{"max_moves": null}').max_moves is None


def test_the_goal_is_made_of_what_placements_keep_to() -> None:
    text = '{"num_nodes": 2, "num_groups": 6, "cover_rank_loss": true, "max_moves": 7}'
    goal = EplbConfig.parse(text).goal(17)
    assert (goal.num_nodes, goal.num_groups, goal.min_replicas, goal.max_moves) == (2, 6, 2, 17)
    goal = EplbConfig().goal(None)
    assert (goal.num_nodes, goal.num_groups, goal.min_replicas, goal.max_moves) == (1, 1, 1, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("{'window_size': 1}", "is not JSON"),
        ("window_size=1", "is not JSON"),
        ('{"window_size": ' + "1" * 5000 + "}", "is not JSON"),
        ("[" * 100_000, "is not usable JSON: nested too deeply"),
        ("[]", "must be a JSON object"),
        ("1000", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"windowsize": 1}', "has no key 'windowsize'; did you mean window_size?"),
        ('{"max_move": 1}', "has no key 'max_move'; did you mean max_moves?"),
        ('{"x": 1}', "has no key 'x'; known: window_size, step_interval"),
        ('{"window_size": "7"}', "window_size '7' must be int"),
        ('{"window_size": 7.0}', "window_size 7.0 must be int"),
        ('{"window_size": true}', "window_size True must be int"),
        ('{"window_size": null}', "window_size None must be int"),
        ('{"use_async": 1}', "use_async 1 must be bool"),
        ('{"max_moves": "all"}', "max_moves 'all' must be int or NoneType"),
        ('{"policy": "flat"}', "policy 'flat' must be one of 'default'"),
        ('{"policy": ["default"]}', "policy ['default'] must be one of 'default'"),
        ('{"min_gain": false}', "min_gain False must be float"),
        ('{"window_size": 0}', "window_size 0 must be between 1 and"),
        ('{"step_interval": -1}', "step_interval -1 must be between 0 and"),
        ('{"num_redundant_experts": -1}', "num_redundant_experts -1 must be between 0 and"),
        ('{"log_balancedness_interval": 0}', "log_balancedness_interval 0 must be between 1 and"),
        ('{"max_moves": -1}', "max_moves -1 must be between 0 and"),
        ('{"max_moves": 2147483648}', "max_moves 2147483648 must be between 0 and 2147483647"),
        ('{"num_nodes": 0}', "num_nodes 0 must be between 1 and"),
        ('{"num_groups": 0}', "num_groups 0 must be between 1 and"),
        ('{"staging_mib": 0}', "staging_mib 0 must be between 1 and"),
        ('{"min_gain": -1.5}', "min_gain -1.5 must be between -1 and 1"),
        ('{"min_gain": NaN}', "min_gain nan must be between -1 and 1"),
        ('{"min_gain": Infinity}', "min_gain inf must be between -1 and 1"),
        ('{"transfer_timeout": 0}', "transfer_timeout 0 must be above 0"),
        ('{"transfer_timeout": NaN}', "transfer_timeout nan must be above 0"),
        ('{"transfer_timeout": 1e999}', "transfer_timeout inf must be above 0, and finite"),
        ('{"num_groups": 4}', "num_groups 4 has no effect on one node; set num_nodes"),
        ('{"num_nodes": 2}', "num_nodes 2 has no effect: num_groups 1 does not divide by it"),
        ('{"num_nodes": 2, "num_groups": 7}', "num_groups 7 does not divide by it"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_what_cannot_be_is_told_by_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        EplbConfig.parse(text)
    shown = str(error.value)
    assert shown.startswith("--eplb-config ") and "\n" not in shown and len(shown) < 500


PARALLEL = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, "--enable-eplb True has no effect without expert parallelism; add "
         "--enable-expert-parallel"),
        ({"ep_num_redundant_experts": 4}, "--ep-num-redundant-experts 4 has no effect without"),
        ({"init_expert_location": "p.json"}, "--init-expert-location p.json has no effect without"),
        (PARALLEL | {"eplb_config": "{}"}, "--eplb-config has no effect without --enable-eplb"),
        (PARALLEL | {"ep_num_redundant_experts": -1},
         "--ep-num-redundant-experts -1 must be at least 0"),
        (PARALLEL | {"enable_eplb": True, "eplb_config": "[]"}, "--eplb-config must be a JSON"),
        (PARALLEL | {"enable_eplb": True, "ep_num_redundant_experts": 4,
                     "eplb_config": '{"num_redundant_experts": 7}'},
         "--ep-num-redundant-experts 4 and --eplb-config num_redundant_experts 7 differ"),
        (PARALLEL | {"init_expert_location": "p.json", "expert_placement_strategy": "round_robin"},
         "--init-expert-location both place the experts"),
    ],
)  # fmt: skip
def test_options_that_clash_or_do_nothing_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(**options)


def test_redundant_experts_are_counted_once() -> None:
    config = EngineConfig(**PARALLEL, enable_eplb=True, eplb_config='{"num_redundant_experts": 7}')
    assert config.num_redundant_experts == 7
    both = EngineConfig(
        **PARALLEL, enable_eplb=True, eplb_config='{"num_redundant_experts": 7}',
        ep_num_redundant_experts=7,
    )  # fmt: skip
    assert both.num_redundant_experts == 7
    assert EngineConfig(**PARALLEL, ep_num_redundant_experts=4).num_redundant_experts == 4


def test_steps_do_not_wait_longer_for_experts_than_a_step_may_take() -> None:
    options: dict[str, Any] = {"enable_expert_parallel": True, "enable_eplb": True}
    late = '{"use_async": false, "transfer_timeout": 20}'
    with pytest.raises(ConfigError, match=r"transfer_timeout 20 .* below --step-timeout 20"):
        ServeConfig(**options, eplb_config=late, step_timeout=20)
    assert ServeConfig(**options, eplb_config=late, step_timeout=20.5)
    assert ServeConfig(**options, eplb_config=late.replace("false", "true"), step_timeout=20)
