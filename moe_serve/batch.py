"""From the plan of a step to flat tensors."""

from __future__ import annotations

import dataclasses
import itertools
import operator

import numpy as np
import numpy.typing as npt
import torch

from moe_serve.context import StepContext
from moe_serve.experts.recording import DECODE, PREFILL, RECOMPUTED
from moe_serve.request import Request
from moe_serve.step import Chunk, StepPlan
from moe_serve.upload import to_device

# Shapes: T tokens, S sequences, B blocks.

Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    token_ids_T: torch.Tensor
    context: StepContext


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """The plan of one lane; without chunks all tensors have length 0.

    Example, block_size 4: one chunk of positions 3..5 whose blocks are 7 and 2 writes to slots
    7*4+3, 2*4+0 and 2*4+1.
    """
    chunks = plan.chunks
    requests = [chunk.request for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    lengths = [chunk.num_tokens for chunk in chunks]
    stops = list(map(operator.add, starts, lengths))
    query_starts = [0, *itertools.accumulate(lengths)]
    # What a position is more than its token's number in the batch.
    firsts = np.array((starts, query_starts[:-1]), dtype=np.int64)
    shifts_S = firsts[0] - firsts[1]
    sequence_T = np.repeat(np.arange(len(chunks)), np.array(lengths, dtype=np.int64))
    positions_T = np.arange(query_starts[-1]) + shifts_S[sequence_T]
    tables_SB = _block_tables(requests, stops, block_size)
    blocks_T, offsets_T = np.divmod(positions_T, block_size)
    slots_T = tables_SB[sequence_T, blocks_T] * block_size + offsets_T
    ids: list[int] = []
    for request, start, stop in zip(requests, starts, stops, strict=True):
        ids += request.tokens_between(start, stop)
    context = StepContext(
        positions_T=to_device(positions_T, torch.int64, device),
        slots_T=to_device(slots_T, torch.int64, device),
        query_starts=query_starts,
        context_lens=stops,
        block_tables_SB=to_device(tables_SB, torch.int64, device),
        num_decodes=lengths.count(1),
        block_size=block_size,
        phases_T=to_device(_phases(chunks), torch.int32, device),
    )
    token_ids_T = to_device(np.array(ids, dtype=np.int64), torch.int64, device)
    return Batch(token_ids_T=token_ids_T, context=context)


def _phases(chunks: tuple[Chunk, ...]) -> npt.NDArray[np.int32]:
    """Of each token, in the order in which a chunk has them: see `Chunk.phase_lengths`."""
    lengths: list[int] = []
    for chunk in chunks:
        num_prefilled, num_decoded, num_recomputed = chunk.phase_lengths
        lengths += (num_recomputed, num_prefilled, num_decoded)
    phases = [RECOMPUTED, PREFILL, DECODE] * len(chunks)
    return np.repeat(np.array(phases, dtype=np.int32), lengths)


def _block_tables(requests: list[Request], stops: list[int], block_size: int) -> Array:
    """[S, B] int64: the blocks that hold each sequence up to its chunk's end, padded with 0."""
    counts = [-(-stop // block_size) for stop in stops]
    tables_SB = np.zeros((len(requests), max(counts, default=0)), dtype=np.int64)
    for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
        # An array, of which this is a view: long contexts have many blocks, most as before.
        tables_SB[row, :count] = np.asarray(request.block_ids)[:count]
    return tables_SB
