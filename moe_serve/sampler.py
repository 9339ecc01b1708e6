"""From the logits of a step to one token per row."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from moe_serve.errors import LogitsError, NoTokenLeftError
from moe_serve.kernels.keep_top import keep_top
from moe_serve.kernels.sampling import fixed_point_weights, pick
from moe_serve.logit_edits import SamplingRow, edit_logits
from moe_serve.logprobs import token_logprobs
from moe_serve.messages import TokenLogprobs
from moe_serve.step import SampledToken
from moe_serve.upload import to_device

__all__ = ["Sampler", "SamplingRow", "uniform"]


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that chooses output token `index` of a request: 53 bits of a hash.

    A function of nothing else, so that neither company nor preemption changes a request's tokens.
    """
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


class Sampler:
    """Chooses the next token of every row; each row's result is the same in any batch.

    `vocab_size`: width of the logits.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        assert vocab_size > 0
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def __call__(
        self, logits_SV: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[SampledToken | LogitsError]:
        """One entry per row: its token, or why it cannot have one while the others can.

        `logits_SV` [S, vocab_size], any float type, any device; left unchanged. A `LogitsError`
        (returned, not raised) stands for a row whose logits hold NaN, plus infinity or nothing
        finite, or whose bias and `min_tokens` leave no token.
        """
        assert logits_SV.shape == (len(rows), self.vocab_size)
        if not rows:
            return []
        edited_SV = self._edit(logits_SV, rows)
        max_S, ids_S = _likeliest(edited_SV)
        given_S = max_S if edited_SV is logits_SV else logits_SV.amax(dim=-1)
        _sample(edited_SV, max_S, rows, ids_S)
        ids, given, largest = _to_host(ids_S, given_S, max_S)
        token_ids = list(map(int, ids))
        logprobs = self._logprobs(logits_SV, rows, token_ids)
        results: list[SampledToken | LogitsError] = []
        for index, token_id in enumerate(token_ids):
            if not math.isfinite(given[index]):
                results.append(LogitsError("the model gave logits that are not finite"))
            elif not math.isfinite(largest[index]):
                results.append(
                    NoTokenLeftError("logit_bias and min_tokens leave no token to choose")
                )
            else:
                results.append(SampledToken(token_id=token_id, logprobs=logprobs.get(index)))
        return results

    def _edit(self, logits_SV: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """fp32 logits after bias, masks and penalties; the same tensor where nothing changes."""
        if not any(row.edits_logits for row in rows):
            return logits_SV.float()
        edited_SV = logits_SV.float().clone()
        edit_logits(edited_SV, rows, self.eos_token_ids)
        return edited_SV

    def _logprobs(
        self, logits_SV: torch.Tensor, rows: Sequence[SamplingRow], token_ids: list[int]
    ) -> dict[int, TokenLogprobs]:
        """Entries for the rows that ask, by row, from the model's own logits."""
        num_top = {
            index: row.params.logprobs
            for index, row in enumerate(rows)
            if row.params.logprobs is not None
        }
        if not num_top:
            return {}
        who = list(num_top)
        entries = token_logprobs(
            _rows_of(logits_SV, who),
            [token_ids[index] for index in who],
            max(num_top.values()),
        )
        return {
            index: _shortened(entry, num_top[index])
            for index, entry in zip(who, entries, strict=True)
        }


def _likeliest(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By row, the largest (NaN before all others) and the first id that has it."""
    if not logits_SV.is_cpu:
        largest = logits_SV.max(dim=-1)
        return largest.values, largest.indices
    # sync: none on the CPU, where numpy finds it 15 to 50 times as fast as torch.
    ids_S = torch.from_numpy(logits_SV.numpy().argmax(axis=-1))
    return logits_SV.gather(-1, ids_S.unsqueeze(-1)).squeeze(-1), ids_S


def _to_host(*columns: torch.Tensor) -> list[list[float]]:
    """The values of some columns of one length, each a number that a double can hold."""
    # sync: the one of a step, for all that the host must know of it. One copy, where it is one.
    if columns[0].is_cpu:
        return [column.tolist() for column in columns]
    return [*torch.stack([column.double() for column in columns]).tolist()]


def _sample(
    logits_SV: torch.Tensor, max_S: torch.Tensor, rows: Sequence[SamplingRow], ids_S: torch.Tensor
) -> None:
    """Overwrite in `ids_S`, the likeliest tokens, the choice of every row that is not greedy."""
    who = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not who:
        return
    chosen = [rows[index] for index in who]
    logits_RV = _rows_of(logits_SV, who)
    weights_RV = fixed_point_weights(
        logits_RV,
        _rows_of(max_S, who).unsqueeze(-1),
        _column(logits_SV, [row.params.temperature for row in chosen], torch.float32),
    )
    weights_RV = _filter(weights_RV, logits_RV, chosen)
    uniforms = [uniform(row.seed, len(row.output_token_ids)) for row in chosen]
    min_ps = [row.params.min_p for row in chosen]
    ids_R = pick(
        weights_RV,
        _column(logits_SV, uniforms, torch.float64),
        _column(logits_SV, min_ps, torch.float64) if any(min_ps) else None,
    )
    ids_S[to_device(who, torch.int64, ids_S.device)] = ids_R


def _filter(
    weights_RV: torch.Tensor, logits_RV: torch.Tensor, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    """Zero what top-k and top-p drop. Rows without either are not sorted."""
    vocab_size = logits_RV.shape[1]
    top_ks = [_effective_top_k(row.params.top_k, vocab_size) for row in rows]
    who = [
        index
        for index, row in enumerate(rows)
        if top_ks[index] < vocab_size or row.params.top_p < 1
    ]
    if who:
        top_k = to_device([top_ks[index] for index in who], torch.int64, logits_RV.device)
        top_p = _column(logits_RV, [rows[index].params.top_p for index in who], torch.float64)
        weights_RV[to_device(who, torch.int64, weights_RV.device)] = keep_top(
            _rows_of(weights_RV, who), _rows_of(logits_RV, who), top_k, top_p.squeeze(-1)
        )
    return weights_RV


def _effective_top_k(top_k: int, vocab_size: int) -> int:
    return top_k if 0 < top_k < vocab_size else vocab_size


def _rows_of(values: torch.Tensor, who: list[int]) -> torch.Tensor:
    """The rows `who`, ascending and distinct; without a copy when these are all rows."""
    if len(who) == values.shape[0]:
        return values
    return values[to_device(who, torch.int64, values.device)]


def _column(like: torch.Tensor, values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return to_device(values, dtype, like.device).unsqueeze(-1)


def _shortened(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    if len(entry.top_token_ids) <= num_top:
        return entry
    return TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids[:num_top],
        top_logprobs=entry.top_logprobs[:num_top],
    )
