"""The forward context: one step's batch as flat tensors, shared by every layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from moe_serve.kernels.attention_work import AttentionWork, Cut, plan_attention

# Shapes: T tokens of the step, S sequences of the step, B blocks, s slots of a block,
# N kv heads, h head_dim.


class Decodes(NamedTuple):
    """The sequences with one new token, longest first: their numbers, lengths and tables."""

    order_S: torch.Tensor
    lens: list[int]
    lens_S: torch.Tensor
    block_tables_SB: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepContext:
    """Sequences with one new token (decodes) come first; `num_decodes` of them.

    - `positions_T`: position of each token in its sequence, int64.
    - `slots_T`: where its K/V go: block id * block_size + offset in the block, int64; -1: nowhere.
    - `query_starts`: S + 1 offsets into T, plain ints (known on the host: no sync).
    - `context_lens`: S counts of positions that a sequence's last new token sees, itself included.
      0: the sequence is padding, and its rows of attention hold anything.
    - `block_tables_SB`: block ids in order, padded with 0; int64.
    - `phases_T`: the phase of each token, an index into `experts.recording.PHASES`, int32; None:
      0 for all.
    - `num_valid_1`: one int32 on the device: rows of T from there on are padding, which a captured
      graph needs, and nothing may count them. None: there is no padding.
    - `works`: what attention kernels planned so far; a captured graph brings its own.
    """

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_tables_SB: torch.Tensor
    num_decodes: int
    block_size: int
    phases_T: torch.Tensor | None = None
    num_valid_1: torch.Tensor | None = None
    works: dict[Cut, AttentionWork] = dataclasses.field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @functools.cached_property
    def decodes(self) -> Decodes:
        order = sorted(range(self.num_decodes), key=lambda i: -self.context_lens[i])
        lens = [self.context_lens[i] for i in order]
        device = self.block_tables_SB.device
        order_S = torch.tensor(order, dtype=torch.int64, device=device)
        lens_S = torch.tensor(lens, dtype=torch.int64, device=device)
        return Decodes(order_S, lens, lens_S, self.block_tables_SB[order_S])

    @functools.cached_property
    def host_spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`query_starts` and `context_lens` as int64 tensors in the host's memory."""
        return torch.tensor(self.query_starts), torch.tensor(self.context_lens, dtype=torch.int64)

    def work(self, cut: Cut) -> AttentionWork:
        """The plan of attention, made for the first layer that asks and used by all."""
        if cut not in self.works:
            plan = plan_attention(self.query_starts, self.context_lens, cut)
            self.works[cut] = plan.to(self.block_tables_SB.device)
        return self.works[cut]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """Paged keys and values of one layer: two tensors [B, s, N, h].

    In float8_e4m3fn a number x is kept as x / scale, at most 448 either way.
    """

    keys_BsNh: torch.Tensor
    values_BsNh: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0
