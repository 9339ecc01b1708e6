from __future__ import annotations

import torch

from moe_serve.batch import build_batch
from moe_serve.step import Chunk, StepPlan

CPU = torch.device("cpu")


def test_positions_slots_and_tables_of_two_chunks(make_request):
    decode, prompt = make_request("decode", range(5)), make_request("prompt", range(10, 17))
    decode.output_token_ids, decode.block_ids = [90], [3, 5]
    prompt.block_ids = [7, 2, 1]
    batch = build_batch(
        StepPlan(
            chunks=(
                Chunk(request=decode, start=5, num_tokens=1),
                Chunk(request=prompt, start=3, num_tokens=3),
            )
        ),
        4,
        CPU,
    )
    assert batch.token_ids_T.tolist() == [90, 13, 14, 15]
    assert batch.context.positions_T.tolist() == [5, 3, 4, 5]
    assert batch.context.slots_T.tolist() == [5 * 4 + 1, 7 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1]
    assert batch.context.block_tables_SB.tolist() == [[3, 5], [7, 2]]
    assert (batch.context.query_starts, batch.context.context_lens) == ([0, 1, 4], [6, 6])
    assert batch.context.num_decodes == 1


def test_an_idle_lane_has_a_batch_of_nothing(make_request):
    full = build_batch(
        StepPlan(chunks=(Chunk(request=_with_block(make_request("a", [1])), start=0,
                               num_tokens=1),)), 4, CPU)  # fmt: skip
    empty = build_batch(StepPlan(chunks=()), 4, CPU)
    for some, none in (
        (full.token_ids_T, empty.token_ids_T),
        (full.context.positions_T, empty.context.positions_T),
        (full.context.slots_T, empty.context.slots_T),
        (full.context.block_tables_SB, empty.context.block_tables_SB),
    ):
        assert none.dtype == some.dtype == torch.int64 and none.dim() == some.dim()
        assert len(none) == 0
    assert (empty.context.query_starts, empty.context.context_lens) == ([0], [])
    assert (empty.context.num_tokens, empty.context.num_sequences) == (0, 0)
    assert empty.context.num_decodes == 0


def _with_block(request):
    request.block_ids = [0]
    return request
