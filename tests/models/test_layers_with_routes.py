"""Routes are of layers with experts alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.config import EngineConfig
from moe_serve.engine_loader import load_engine
from moe_serve.messages import AddRequest
from moe_serve.sampling_params import SamplingParams

PROMPT = [(5 * i * i + i) % 256 for i in range(17)]


@pytest.mark.parametrize(
    ("family", "fields", "num_layers"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0]}, 1),
        ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 5}, 2),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, 0),
    ],
    ids=str,
)
def test_dense_layers_are_left_out(
    make_tiny: Any, family: str, fields: dict[str, Any], num_layers: int
) -> None:
    tiny = make_tiny(family, **fields)
    engine = load_engine(EngineConfig(model=str(tiny.folder), dtype="float32", num_threads=1))
    params = SamplingParams(max_tokens=1, temperature=0, return_routed_experts=True)
    engine.add(AddRequest(request_id="a", prompt_token_ids=PROMPT, sampling=params))
    (update,) = engine.step().updates
    engine.close()
    assert update.routes is not None and update.routes.shape[:2] == (17, num_layers)
    if num_layers:
        with torch.inference_mode():
            model = tiny.reference().model
            logits = model(torch.tensor([PROMPT]), output_router_logits=True).router_logits
        expected = torch.stack([logits_TE.topk(2).indices for logits_TE in logits], 1)
        assert np.array_equal(update.routes.ids_TLK, expected.numpy())
