"""What a replayed step reads: its own inputs, and nothing of the steps before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_serve.batch import Batch
from moe_serve.context import LayerKV, StepContext
from moe_serve.decode_graphs import DecodeGraphs
from moe_serve.kernels.attention_work import Cut, plan_attention

BLOCK_SIZE = 4
CUT = Cut(query_tokens=1, split=4)


class Model:
    """Stands for a decoder: notes what it was called with, and gives the tokens back."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def __call__(self, token_ids_S: Tensor, context: StepContext, *_: Any) -> Tensor:
        assert context.num_valid_1 is not None and context.phases_T is not None
        work = context.work(CUT)
        seen = {
            "slots": context.slots_T,
            "positions": context.positions_T,
            "phases": context.phases_T,
            "tables": context.block_tables_SB,
            "valid": context.num_valid_1,
            "counts": work.counts_4,
            "blocks": work.blocks_Q4,
        }
        self.seen.append({name: tensor.clone() for name, tensor in seen.items()})
        return token_ids_S[:, None].float()


def make_batch(lens: Sequence[int], new_tokens: Sequence[int] | None = None) -> Batch:
    """Sequences of `lens` tokens, one of them new unless said; number i has blocks from 10 i on."""
    new_tokens = new_tokens or [1] * len(lens)
    width = max((-(-length // BLOCK_SIZE) for length in lens), default=0)
    positions = [p for n, new in zip(lens, new_tokens, strict=True) for p in range(n - new, n)]
    context = StepContext(
        positions_T=torch.tensor(positions, dtype=torch.int64),
        slots_T=torch.arange(len(positions)) + 100,
        query_starts=[0, *itertools.accumulate(new_tokens)],
        context_lens=list(lens),
        block_tables_SB=torch.arange(len(lens))[:, None] * 10 + torch.arange(width),
        num_decodes=sum(new == 1 for new in new_tokens),
        block_size=BLOCK_SIZE,
        phases_T=(torch.arange(len(positions), dtype=torch.int32) + sum(lens)) % 3,
    )
    return Batch(token_ids_T=torch.arange(len(positions)) + 7, context=context)


def make_graphs(model: Any) -> DecodeGraphs:
    pool = torch.zeros(2, BLOCK_SIZE, 1, 1)
    graphs = DecodeGraphs(
        model,
        [LayerKV(keys_BsNh=pool, values_BsNh=pool)],
        None,  # type: ignore[arg-type]
        max_num_seqs=4,
        max_model_len=20,
        capture=lambda forward: forward,
    )
    assert list(graphs.capture_all()) == [4, 2, 1]
    return graphs


def test_nothing_is_left_of_an_earlier_step() -> None:
    model = Model()
    graphs = make_graphs(model)
    assert all((seen["slots"] == -1).all() and not seen["valid"].any() for seen in model.seen)
    for lens in ([20, 3, 9, 17], [5, 6, 7], [1], [2, 19], [20, 20, 20], [4, 4, 4, 4]):
        batch = make_batch(lens)
        context, count = batch.context, len(lens)
        hidden_SD = graphs.run(batch)
        assert hidden_SD is not None
        assert hidden_SD[:, 0].tolist() == batch.token_ids_T.tolist()
        seen = model.seen[-1]
        assert len(seen["slots"]) == {1: 1, 2: 2, 3: 4, 4: 4}[count]
        assert seen["valid"].tolist() == [count]
        assert seen["slots"].tolist()[:count] == context.slots_T.tolist()
        assert seen["slots"].tolist()[count:] == [-1] * (len(seen["slots"]) - count)
        assert seen["positions"].tolist()[:count] == context.positions_T.tolist()
        assert context.phases_T is not None
        assert seen["phases"].tolist()[:count] == context.phases_T.tolist()
        # Counted nowhere, those of padding must still be some row of the counters.
        assert set(seen["phases"].tolist()) <= {0, 1, 2}
        width = context.block_tables_SB.shape[1]
        assert torch.equal(seen["tables"][:count, :width], context.block_tables_SB)
        work = plan_attention(context.query_starts, context.context_lens, CUT)
        assert torch.equal(seen["counts"], work.counts_4)
        assert torch.equal(seen["blocks"][: len(work.blocks_Q4)], work.blocks_Q4)


def test_steps_with_prompts_and_those_larger_than_any_graph_are_not_replayed() -> None:
    model = Model()
    graphs = make_graphs(model)
    captured = len(model.seen)
    for batch in (make_batch([5, 6], [1, 2]), make_batch([9] * 5), make_batch([])):
        assert graphs.run(batch) is None
    assert len(model.seen) == captured
