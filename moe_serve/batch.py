"""From the plan of a step to flat tensors."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
import torch

from moe_serve.context import StepContext
from moe_serve.experts.recording import DECODE, PREFILL, RECOMPUTED
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
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    tables_SB = _block_tables(chunks, block_size)
    query_starts = np.concatenate(([0], lengths.cumsum()))
    sequence_T = np.repeat(np.arange(len(chunks)), lengths)
    positions_T = np.arange(query_starts[-1]) - query_starts[sequence_T] + starts[sequence_T]
    slots_T = tables_SB[sequence_T, positions_T // block_size] * block_size
    slots_T += positions_T % block_size
    ids = itertools.chain.from_iterable(
        chunk.request.tokens_between(chunk.start, chunk.stop) for chunk in chunks
    )
    context = StepContext(
        positions_T=to_device(positions_T, torch.int64, device),
        slots_T=to_device(slots_T, torch.int64, device),
        query_starts=list(map(int, query_starts)),
        context_lens=[chunk.stop for chunk in chunks],
        block_tables_SB=to_device(tables_SB, torch.int64, device),
        num_decodes=sum(chunk.num_tokens == 1 for chunk in chunks),
        block_size=block_size,
        phases_T=to_device(_phases(chunks), torch.int32, device),
    )
    token_ids_T = to_device(list(ids), torch.int64, device)
    return Batch(token_ids_T=token_ids_T, context=context)


def _phases(chunks: tuple[Chunk, ...]) -> Array:
    """Of each token, in the order in which a chunk has them: see `Chunk.phase_lengths`."""
    lengths: list[int] = []
    for chunk in chunks:
        num_prefilled, num_decoded, num_recomputed = chunk.phase_lengths
        lengths += (num_recomputed, num_prefilled, num_decoded)
    phases = [RECOMPUTED, PREFILL, DECODE] * len(chunks)
    return np.repeat(np.array(phases, dtype=np.int32), lengths)


def _block_tables(chunks: tuple[Chunk, ...], block_size: int) -> Array:
    """[S, B] int64: the blocks that hold each sequence up to its chunk's end, padded with 0."""
    counts = [-(-chunk.stop // block_size) for chunk in chunks]
    tables_SB = np.zeros((len(chunks), max(counts, default=0)), dtype=np.int64)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        # An array, of which this is a view: long contexts have many blocks, most as before.
        tables_SB[row, :count] = np.asarray(chunk.request.block_ids)[:count]
    return tables_SB
