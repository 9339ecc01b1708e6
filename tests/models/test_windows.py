"""Sliding windows, as each family reads them from its config."""

from __future__ import annotations

import pytest

from moe_serve.errors import CheckpointError

WINDOW = 8
ON = {"use_sliding_window": True, "sliding_window": WINDOW}
# family, fields, the window of each layer
CASES = {
    "mixtral": ("mixtral", {"sliding_window": WINDOW}, [WINDOW, WINDOW]),
    "mixtral-none": ("mixtral", {"sliding_window": None}, [None, None]),
    "qwen3": ("qwen3_moe", ON, [WINDOW, WINDOW]),
    "qwen3-off": ("qwen3_moe", {"sliding_window": WINDOW}, [None, None]),
    "qwen2-one-layer": ("qwen2_moe", {**ON, "max_window_layers": 1}, [WINDOW, None]),
    "qwen2-every-second": (
        "qwen2_moe",
        {**ON, "num_hidden_layers": 3},
        [WINDOW, None, WINDOW],
    ),
    "qwen2-listed": (
        "qwen2_moe",
        {**ON, "layer_types": ["full_attention", "sliding_attention"]},
        [None, WINDOW],
    ),
    "qwen2-off": ("qwen2_moe", {"sliding_window": WINDOW}, [None, None]),
    "olmoe-never": ("olmoe", {"sliding_window": WINDOW}, [None, None]),
}


@pytest.mark.parametrize("name", CASES)
def test_windows_equal_transformers_layer_by_layer(make_tiny, name: str) -> None:
    family, fields, windows = CASES[name]
    tiny = make_tiny(family, **fields)
    assert [layer.attention.window for layer in tiny.decoder().spec.layers] == windows
    tiny.assert_same_scores(40)


def test_a_window_holds_while_decoding(make_tiny) -> None:
    make_tiny("mixtral", sliding_window=WINDOW).assert_same_greedy(3, 40)


def test_a_window_changes_what_is_seen(make_tiny) -> None:
    windowed = make_tiny("mixtral", sliding_window=WINDOW).runner()
    whole = make_tiny("mixtral").runner()
    prompt = list(range(40))
    difference = (windowed.score(prompt) - whole.score(prompt)).abs().amax(-1)
    assert difference[:WINDOW].max() == 0
    assert difference[WINDOW:].min() > 0


def test_a_window_of_nothing_is_refused(make_tiny) -> None:
    tiny = make_tiny("mixtral")
    tiny.edit_config(sliding_window=0)
    with pytest.raises(CheckpointError, match="sliding_window 0 must be at least 1"):
        tiny.decoder()
