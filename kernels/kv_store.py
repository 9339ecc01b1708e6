"""Write new keys and values into their slots of the paged pool."""

from __future__ import annotations

from torch import Tensor

from moe_serve.context import LayerKV


def kv_store(k_TNh: Tensor, v_TNh: Tensor, kv: LayerKV, slots_T: Tensor) -> None:
    """Row t goes to slot `slots_T[t]` = block id * block_size + offset. Slots are distinct."""
    kv.keys_BsNh.flatten(0, 1).index_copy_(0, slots_T, k_TNh)
    kv.values_BsNh.flatten(0, 1).index_copy_(0, slots_T, v_TNh)
