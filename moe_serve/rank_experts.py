"""The experts of one rank, where they may move: fetched beside those in use, then switched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.experts.moving.staging import ExpertStaging
from moe_serve.experts.placement import LayerPlacement
from moe_serve.layers.moe import MoE
from moe_serve.models.decoder import Decoder
from moe_serve.parallel.world import World, own_address
from moe_serve.rank_messages import Staging


class RankExperts:
    """Every rank makes one after loading; then each learns the addresses of all."""

    def __init__(self, model: Decoder, world: World) -> None:
        self._layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
        banks = [layer.experts for layer in self._layers]
        self._staging = ExpertStaging(banks, world.seat.rank, own_address(world))

    @property
    def address(self) -> str:
        """Where other ranks get weights from."""
        return self._staging.address

    def connect(self, addresses: Sequence[str]) -> None:
        self._staging.connect(addresses)

    def stage(self, copies: Sequence[ExpertCopy], timeout: float) -> None:
        self._staging.start(copies, timeout)

    def staging(self) -> Staging:
        state = self._staging.state()
        return Staging(is_done=state.is_done, num_bytes=state.num_bytes, error=state.error)

    def switch(self, layers: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Weights and maps together. `layers`: see `SwitchExperts`."""
        self._staging.apply()
        for index, experts in layers.items():
            self._layers[index].place(LayerPlacement(tuple(map(tuple, experts))))

    def drop_staged(self) -> None:
        self._staging.drop()

    def checksums(self) -> list[list[int]]:
        return self._staging.checksums()

    def close(self) -> None:
        self._staging.close()
