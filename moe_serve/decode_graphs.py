"""Decode steps captured once and replayed: one launch instead of hundreds.

A captured graph has fixed shapes and addresses. So there is one for each of a few batch sizes, all
of which read the same tensors; a step is copied there and padded to the next size.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_serve.batch import Batch
from moe_serve.context import LayerKV, StepContext
from moe_serve.experts.load import ExpertLoad
from moe_serve.kernels.attention_work import AttentionWork, Cut
from moe_serve.models.decoder import Decoder

# Shapes: S sequences, one token each, with padding; B blocks of a sequence, D model.

Forward = Callable[[], Tensor]
# Captures a forward pass -> what runs it again on what its inputs hold by then.
Capture = Callable[[Forward], Forward]

# Batch size from which on sizes are farther apart -> how far.
_STEPS = {0: 1, 2: 2, 4: 4, 8: 8, 64: 16, 256: 32}


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: a step is padded to the next.

    Example: 30 -> 1, 2, 4, 8, 16, 24, 30.
    """
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        step = next(step for start, step in reversed(_STEPS.items()) if start <= sizes[-1])
        sizes.append(min(sizes[-1] + step, max_num_seqs))
    return sizes


class StaticBatch:
    """What graphs read: up to `max_num_seqs` sequences of up to `max_model_len` tokens."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_model_len = max_model_len
        self.block_size = block_size
        self.token_ids_S = zeros(max_num_seqs)
        self.positions_S = zeros(max_num_seqs)
        self.slots_S = zeros(max_num_seqs) - 1
        self.block_tables_SB = zeros(max_num_seqs, -(-max_model_len // block_size))
        self.phases_S = zeros(max_num_seqs, dtype=torch.int32)
        self.num_valid_1 = zeros(1, dtype=torch.int32)
        self.works: dict[Cut, AttentionWork] = {}

    def context(self, size: int) -> StepContext:
        """Of the first `size` sequences. The host's lengths are the longest there can be."""
        return StepContext(
            positions_T=self.positions_S[:size],
            slots_T=self.slots_S[:size],
            query_starts=list(range(size + 1)),
            context_lens=[self.max_model_len] * size,
            block_tables_SB=self.block_tables_SB[:size],
            num_decodes=size,
            block_size=self.block_size,
            phases_T=self.phases_S[:size],
            num_valid_1=self.num_valid_1,
            works=self.works,
        )

    def fill(self, batch: Batch) -> None:
        """Take over a step; every row behind its own is padding."""
        context = batch.context
        count, width = context.block_tables_SB.shape
        self.slots_S.fill_(-1)
        self.num_valid_1.fill_(count)
        self.token_ids_S[:count].copy_(batch.token_ids_T)
        self.positions_S[:count].copy_(context.positions_T)
        self.slots_S[:count].copy_(context.slots_T)
        assert context.phases_T is not None
        self.phases_S[:count].copy_(context.phases_T)
        self.block_tables_SB[:count, :width].copy_(context.block_tables_SB)
        for cut, work in self.works.items():
            work.copy_(context.work(cut))


class DecodeGraphs:
    """Runs the steps in which every sequence has one new token."""

    def __init__(
        self,
        model: Decoder,
        pool: Sequence[LayerKV],
        load: ExpertLoad,
        *,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture,
    ) -> None:
        block_size = pool[0].keys_BsNh.shape[1]
        self._batch = StaticBatch(max_num_seqs, max_model_len, block_size, model.device)
        self._model, self._pool, self._load = model, pool, load
        self._capture = capture
        self.sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, Forward] = {}

    def capture_all(self) -> Iterator[int]:
        """Each size once its graph is there, largest first: the others then fit its memory.

        On padding alone, which writes no key and counts no token.
        """
        self._make_works()
        for size in reversed(self.sizes):
            self._graphs[size] = self._capture(self._forward(size))
            yield size

    def run(self, batch: Batch) -> Tensor | None:
        """Final hidden states [S, D], good until the next run; None for a step that is not to be
        replayed: one with a prompt, or larger than any graph.
        """
        count = batch.context.num_sequences
        if count == 0 or batch.context.num_decodes < count or count > self.sizes[-1]:
            return None
        self._batch.fill(batch)
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        return self._graphs[size]()[:count]

    def _forward(self, size: int) -> Forward:
        context = self._batch.context(size)
        token_ids_S = self._batch.token_ids_S[:size]
        return lambda: self._model(token_ids_S, context, self._pool, self._load)

    def _make_works(self) -> None:
        """Static plans for whatever cuts the layers ask for: found by running them once."""
        self._forward(1)()
        size = self.sizes[-1]
        for cut in list(self._batch.works):
            self._batch.works[cut] = AttentionWork.of_limits(cut, size, size, self._model.device)


def cuda_capture() -> Capture:
    """Captures that share one pool of memory, since no two of them ever run at once."""
    memory = torch.cuda.graph_pool_handle()

    def capture(forward: Forward) -> Forward:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Kernels compile, and libraries take what they keep, when first run.
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            output = forward()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture
