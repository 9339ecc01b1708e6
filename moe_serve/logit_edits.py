"""What a request changes in its logits before a token is chosen: bias, masks, penalties.

S rows, V vocabulary, n touched (row, token) pairs. The work grows with the tokens that rows
name or hold, never with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from moe_serve.sampling_params import SamplingParams
from moe_serve.upload import to_device

_MAX = torch.finfo(torch.float32).max
# Dividing by less would be dividing by zero once rounded to fp32.
_MIN_REPETITION = 1e-30


class SamplingRow(NamedTuple):
    """One row to sample: a request's parameters, its seed and its tokens so far.

    `seed` is always set; None in `params.seed` is the engine's to replace.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def holds_back_end(self) -> bool:
        """Too few tokens yet to be allowed to end."""
        return len(self.output_token_ids) < self.params.min_tokens

    @property
    def has_output_penalty(self) -> bool:
        return bool(self.params.frequency_penalty or self.params.presence_penalty)

    @property
    def has_repetition_penalty(self) -> bool:
        return self.params.repetition_penalty != 1

    @property
    def edits_logits(self) -> bool:
        return bool(
            self.params.logit_bias
            or self.holds_back_end
            or self.has_output_penalty
            or self.has_repetition_penalty
        )


def edit_logits(
    logits_SV: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: frozenset[int]
) -> None:
    """Apply bias, then masks, then penalties, in place, to fp32 logits.

    A row that asks for nothing keeps its bits. Ids from V on are ignored.
    """
    _add_bias(logits_SV, rows)
    _mask_ends(logits_SV, rows, eos_token_ids)
    _penalize_repetition(logits_SV, rows)
    _penalize_output(logits_SV, rows)


def _add_bias(logits_SV: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (index, token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in row.params.logit_bias.items()
        if token_id < logits_SV.shape[1]
    ]
    if entries:
        indices, token_ids, biases = zip(*entries, strict=True)
        at = _indices(logits_SV, indices), _indices(logits_SV, token_ids)
        logits_SV[at] = (logits_SV[at] + _floats(logits_SV, biases)).clamp(max=_MAX)


def _mask_ends(
    logits_SV: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: frozenset[int]
) -> None:
    entries = [
        (index, token_id)
        for index, row in enumerate(rows)
        if row.holds_back_end
        for token_id in eos_token_ids.union(row.params.stop_token_ids)
        if token_id < logits_SV.shape[1]
    ]
    if entries:
        indices, token_ids = zip(*entries, strict=True)
        logits_SV[_indices(logits_SV, indices), _indices(logits_SV, token_ids)] = -torch.inf


def _penalize_repetition(logits_SV: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Positive logits of tokens in prompt or output are divided, the others multiplied."""
    who = [index for index, row in enumerate(rows) if row.has_repetition_penalty]
    if not who:
        return
    seen = [(index, rows[index].prompt_token_ids + rows[index].output_token_ids) for index in who]
    at, _ = _distinct(logits_SV, seen)
    penalties = [max(row.params.repetition_penalty, _MIN_REPETITION) for row in rows]
    penalty_n = _floats(logits_SV, penalties)[at[0]]
    values_n = logits_SV[at]
    values_n = torch.where(values_n > 0, values_n / penalty_n, values_n * penalty_n)
    logits_SV[at] = values_n.clamp(max=_MAX)


def _penalize_output(logits_SV: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Frequency times the count in the output, and presence once."""
    who = [index for index, row in enumerate(rows) if row.has_output_penalty]
    if not who:
        return
    at, counts_n = _distinct(logits_SV, [(index, rows[index].output_token_ids) for index in who])
    frequency_n = _floats(logits_SV, [row.params.frequency_penalty for row in rows])[at[0]]
    presence_n = _floats(logits_SV, [row.params.presence_penalty for row in rows])[at[0]]
    logits_SV[at] = (logits_SV[at] - counts_n * frequency_n - presence_n).clamp(max=_MAX)


def _distinct(
    logits_SV: torch.Tensor, tokens: list[tuple[int, list[int]]]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Each (row, token id) of `tokens` once, as an index into the logits, and how often it came.

    Example: [(4, [7, 7, 9])] -> (([4, 4], [7, 9]), [2, 1])
    """
    vocab_size = logits_SV.shape[1]
    arrays = [(index, np.asarray(ids, dtype=np.int64)) for index, ids in tokens]
    # Padding ids would land in the next row.
    flat = np.concatenate([ids[ids < vocab_size] + index * vocab_size for index, ids in arrays])
    flat, counts = np.unique(flat, return_counts=True)
    rows_n, ids_n = np.divmod(flat, vocab_size)
    at = _indices(logits_SV, rows_n), _indices(logits_SV, ids_n)
    return at, _indices(logits_SV, counts)


def _indices(like: torch.Tensor, values: Sequence[int] | np.ndarray) -> torch.Tensor:
    return to_device(values, torch.int64, like.device)


def _floats(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return to_device(values, torch.float32, like.device)
