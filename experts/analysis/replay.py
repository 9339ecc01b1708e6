"""Recorded tokens through a placement, step by step: who computes what. Pure.

The recorded tokens are cut into steps: requests in order, `batch_tokens` a step, fewer in the last.
A step's tokens lie on its ranks in equal runs, as those of one lane over all ranks do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.experts.analysis.load_statistics import replica_counts
from moe_serve.experts.placement import Placement
from moe_serve.routing.traffic import Flow, Ints, flow, home_ranks, turns

# Shapes: S steps, L MoE layers, N = S * L layers of steps, T tokens (of a step, where N or S stands
# before it), K top-k, E logical experts, P slots of all ranks, C most replicas, R ranks.

Ids = npt.NDArray[np.int16]

# Choices replayed at once: what keeps memory small, and is far from a numpy call's own cost.
_CHUNK = 2**20


class StepGroup(NamedTuple):
    """Steps of as many tokens each, as one rank count sees them."""

    ids_NTK: Ids
    turns_NTK: Ints
    home_T: Ints

    @property
    def num_tokens(self) -> int:
        """Of each step."""
        return len(self.home_T)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotTable:
    """A placement as a lookup: `slots_LEC`: an expert's slots in order of rank, then unused ones.

    `is_on_PR`: 1 where the slot is that rank's.
    """

    slots_LEC: Ints
    replicas_LE: Ints
    rank_P: Ints
    is_on_PR: npt.NDArray[np.float64]
    most_local: int

    @classmethod
    def make(cls, placement: Placement) -> SlotTable:
        slots_LP, replicas_LE = placement.slots_LP, replica_counts(placement)
        no_home_P = np.zeros(placement.num_slots, dtype=np.int64)
        number_LP = turns(slots_LP[:, :, None], no_home_P, placement.num_experts)[:, :, 0]
        most = int(replicas_LE.max(initial=1))
        slots_LEC = np.zeros((*replicas_LE.shape, most), dtype=np.int64)
        layer_L1 = np.arange(placement.num_layers)[:, None]
        slots_LEC[layer_L1, slots_LP, number_LP] = np.arange(placement.num_slots)
        num_ranks = placement.num_ranks
        rank_P = np.repeat(np.arange(num_ranks), placement.slots_of_ranks)
        return cls(
            slots_LEC=slots_LEC,
            replicas_LE=replicas_LE,
            rank_P=rank_P,
            is_on_PR=np.eye(num_ranks)[rank_P],
            most_local=max(placement.slots_of_ranks),
        )

    @property
    def num_ranks(self) -> int:
        return int(self.is_on_PR.shape[1])

    def choose(self, ids_NTK: Ids, turns_NTK: Ints) -> Ints:
        """[N, T, K]: the slot that computes each choice; N in order of steps, then layers."""
        num_layers, num_experts, most = self.slots_LEC.shape
        layer_N = np.arange(len(ids_NTK)) % num_layers
        expert_NTK = ids_NTK + (layer_N * num_experts)[:, None, None]
        first_NTK = expert_NTK * most
        if most > 1:
            first_NTK += turns_NTK % self.replicas_LE.ravel()[expert_NTK]
        slots: Ints = self.slots_LEC.ravel()[first_NTK]
        return slots


class Replayed(NamedTuple):
    """`rows_NP`: rows of each slot."""

    rows_NP: Ints
    flow: Flow

    @property
    def rows_NR(self) -> Ints:
        """What each rank computes."""
        rows: Ints = self.flow.rows_NHR.sum(1)
        return rows


def cut_steps(ids_TLK: Ids, batch_tokens: int) -> Iterator[Ids]:
    """All steps, in order, as groups of ids [N, T, K]; the last step may be shorter, and alone."""
    num_tokens, num_layers, top_k = ids_TLK.shape
    size = min(batch_tokens, max(1, num_tokens))
    num_full = num_tokens // size
    at_once = max(1, _CHUNK // max(1, size * num_layers * top_k))
    for start in range(0, num_full, at_once):
        stop = min(num_full, start + at_once)
        yield _by_layer(ids_TLK[start * size : stop * size], size)
    if num_full * size < num_tokens:
        yield _by_layer(ids_TLK[num_full * size :], num_tokens - num_full * size)


def sample_steps(ids_TLK: Ids, batch_tokens: int, most_tokens: int) -> Ids:
    """Full steps, spread evenly over the recording: about `most_tokens` tokens, one step at least.

    The recording has one full step at least.
    """
    num_full = len(ids_TLK) // batch_tokens
    assert num_full
    count = min(num_full, max(1, most_tokens // batch_tokens))
    chosen = np.arange(count) * num_full // count
    ids_STLK = ids_TLK[: num_full * batch_tokens].reshape(
        num_full, batch_tokens, *ids_TLK.shape[1:]
    )
    return _by_layer(ids_STLK[chosen].reshape(-1, *ids_TLK.shape[1:]), batch_tokens)


def step_group(
    ids_NTK: Ids, num_layers: int, num_experts: int, num_ranks: int, first_step: int = 0
) -> StepGroup:
    """`first_step`: how many steps came before."""
    home_T = home_ranks(ids_NTK.shape[1], num_ranks)
    step_N = first_step + np.arange(len(ids_NTK)) // num_layers
    return StepGroup(ids_NTK, turns(ids_NTK, home_T, num_experts, step_N), home_T)


def replay(group: StepGroup, table: SlotTable) -> Replayed:
    """Exactly what dispatchers would do with these steps."""
    slot_NTK = table.choose(group.ids_NTK, group.turns_NTK)
    num_slots = len(table.rank_P)
    rows_NP = count_by_row(slot_NTK, num_slots)
    return Replayed(rows_NP, flow(table.rank_P[slot_NTK], group.home_T, table.num_ranks))


def count_by_row(values_NTK: npt.NDArray[Any], size: int) -> Ints:
    """[N, size]: how often each of 0 .. size - 1 stands in a row."""
    num_rows = len(values_NTK)
    flat = values_NTK + (np.arange(num_rows) * size)[:, None, None]
    return np.bincount(flat.ravel(), minlength=num_rows * size).reshape(num_rows, size)


def _by_layer(ids_TLK: Ids, size: int) -> Ids:
    """Full steps of `size` tokens -> [S * L, size, K]."""
    ids_STLK = ids_TLK.reshape(-1, size, *ids_TLK.shape[1:])
    return ids_STLK.swapaxes(1, 2).reshape(-1, size, ids_TLK.shape[2])
