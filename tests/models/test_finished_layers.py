"""Layers that are finished as soon as they are filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from moe_serve.kernels.cpu import library
from moe_serve.kernels.cpu.build import BuildError
from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.loader import load_model
from moe_serve.model_folder import open_model_folder
from moe_serve.models.decoder import Decoder
from moe_serve.models.packing import pack_weights

FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral"]


def load(folder: Path, finish: Callable[[nn.Module], None] | None = None) -> Decoder:
    hf_config = open_model_folder(str(folder), None).hf_config
    return load_model(
        folder,
        hf_config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        show_progress=False,
        finish=finish,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_whole_when_it_is_finished_and_the_decoder_at_last(
    random_family: Callable[[str], Path], family: str
) -> None:
    expected = load(random_family(family))
    finished: list[nn.Module] = []

    def finish(module: nn.Module) -> None:
        twin = expected if isinstance(module, Decoder) else expected.layers[len(finished)]
        found, wanted = dict(module.named_parameters()), dict(twin.named_parameters())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        finished.append(module)

    decoder = load(random_family(family), finish)
    assert finished == [*decoder.layers, decoder]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_layers_packed_in_turn_are_as_if_packed_at_once(
    random_family: Callable[[str], Path], quantization: str | None
) -> None:
    try:
        kernels = library.load()
    except BuildError:
        pytest.skip("no CPU kernels here")
    kernels.choose("auto")
    in_turn = load(
        random_family("qwen2_moe"),
        lambda module: pack_weights(module, kernels, quantization),
    )
    at_once = load(random_family("qwen2_moe"))
    pack_weights(at_once, kernels, quantization)
    assert memory_of(in_turn) == memory_of(at_once)
    pack_weights(in_turn, kernels, quantization)
    assert memory_of(in_turn) == memory_of(at_once)


def memory_of(decoder: Decoder) -> dict[str, bytes]:
    """Of all packed weights, by the name of their module."""
    return {
        f"{name}.{key}": value.data.numpy().tobytes()
        for name, module in decoder.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, PackedWeight)
    }
