"""Keeps which experts the tokens of one step choose, on the device until the step is done."""

from __future__ import annotations

import torch

from moe_serve.models.decoder import Decoder
from moe_serve.parallel.slices import TokenSlices
from moe_serve.token_routes import TokenRoutes

# Shapes: T tokens of the lane, t rows of the rank's token slice, L MoE layers, K top-k.


class RouteCapture:
    """`ids_LtK`: what each MoE layer writes its choices to, of this rank's slice; int16."""

    def __init__(self, model: Decoder, num_tokens: int) -> None:
        """`num_tokens` of the lane in this step."""
        self._slices = TokenSlices(model.ranks.lane, num_tokens)
        layers = model.spec.moe_layers
        top_ks = {layer.router.top_k for layer in layers}
        assert len(top_ks) <= 1, f"layers differ in the experts of a token: {sorted(top_ks)}"
        shape = (len(layers), self._slices.size, max(top_ks, default=0))
        # Rows past the slice's tokens are never looked at, but sent.
        self.ids_LtK = torch.full(shape, -1, dtype=torch.int16, device=model.device)

    def collect(self) -> TokenRoutes | None:
        """Of all tokens of the lane, at its leader; None at its other ranks, which take part."""
        slices = self._slices
        num_layers, _, top_k = self.ids_LtK.shape
        if not self.ids_LtK.numel():
            return TokenRoutes(shape=(slices.num_tokens, num_layers, top_k), ids=b"")
        # As bytes: libraries of collectives know no int16.
        parts = slices.group.gather(self.ids_LtK.view(torch.uint8))
        if parts is None:
            return None
        ids_LTK = torch.cat(parts, dim=1).view(torch.int16)[:, : slices.num_tokens]
        # sync: the client or the recorder gets them with this step's tokens, as it gets logprobs.
        return TokenRoutes.of(ids_LTK.transpose(0, 1).contiguous().cpu().numpy())
