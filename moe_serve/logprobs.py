"""Log-probabilities of the model's own distribution: the chosen token and the likeliest others."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_serve.errors import LogitsError
from moe_serve.kernels.keep_top import rank_keys
from moe_serve.kernels.sampling import log_normalizer
from moe_serve.messages import TokenLogprobs
from moe_serve.upload import to_device

# Bounds the scratch memory to about 100 MB, however long the prompt and wide the vocabulary.
_MAX_BLOCK_ELEMENTS = 2**22


class _Block(NamedTuple):
    """R rows, k alternatives, N valid tokens."""

    logprob_R: torch.Tensor
    rank_R: torch.Tensor
    top_ids_Rk: torch.Tensor
    top_logprobs_Rk: torch.Tensor


def prompt_logprobs(
    logits_TV: torch.Tensor,
    next_token_ids: list[int],
    num_top: int,
) -> list[TokenLogprobs]:
    """What the logits at T positions of one request say about the token that follows each.

    As `token_logprobs`, but checks the logits: raises `LogitsError` if a position holds NaN, plus
    infinity, or nothing finite.
    """
    if not next_token_ids:
        return []
    is_good_T = logits_TV.amax(dim=-1).isfinite()
    # sync: for the requests that ask.
    if not bool(is_good_T.all()):
        position = int((~is_good_T).nonzero()[0])
        raise LogitsError(f"the model gave logits that are not finite at prompt row {position}")
    return token_logprobs(logits_TV, next_token_ids, num_top)


def token_logprobs(
    logits_TV: torch.Tensor,
    token_ids: list[int],
    num_top: int,
) -> list[TokenLogprobs]:
    """One entry per row; `token_ids[t]` is the token chosen at row t.

    Normalised over all V logits, in fp32; `num_top` (at most V) alternatives, best first, equal
    ones by lower id; `rank` is the chosen token's place in that same order. Finite for finite
    logits; a logit of minus infinity reports the lowest fp32 number.
    """
    assert logits_TV.shape[0] == len(token_ids)
    num_rows = max(1, _MAX_BLOCK_ELEMENTS // logits_TV.shape[1])
    chosen_T1 = to_device(token_ids, torch.int64, logits_TV.device).unsqueeze(-1)
    blocks = [
        _block_logprobs(logits_RV.float(), chosen_R1, num_top)
        for logits_RV, chosen_R1 in zip(
            torch.split(logits_TV, num_rows), torch.split(chosen_T1, num_rows), strict=True
        )
    ]
    # sync: for the requests that ask.
    columns = [torch.cat(column).tolist() for column in zip(*blocks, strict=True)]
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_token_ids=top_ids,
            top_logprobs=top_logprobs,
        )
        for token_id, logprob, rank, top_ids, top_logprobs in zip(token_ids, *columns, strict=True)
    ]


def _block_logprobs(logits_RV: torch.Tensor, chosen_R1: torch.Tensor, num_top: int) -> _Block:
    max_R1 = logits_RV.amax(dim=-1, keepdim=True)
    log_total_R1 = log_normalizer(logits_RV, max_R1)
    keys_RV = rank_keys(logits_RV)
    rank_R = 1 + (keys_RV > keys_RV.gather(-1, chosen_R1)).sum(dim=-1)
    top_ids_Rk = keys_RV.topk(min(num_top, keys_RV.shape[-1]), dim=-1).indices

    def logprobs_of(ids_Rn: torch.Tensor) -> torch.Tensor:
        values_Rn = (logits_RV.gather(-1, ids_Rn) - max_R1).double() - log_total_R1
        return values_Rn.float().clamp(min=torch.finfo(torch.float32).min)

    return _Block(
        logprob_R=logprobs_of(chosen_R1).squeeze(-1),
        rank_R=rank_R,
        top_ids_Rk=top_ids_Rk,
        top_logprobs_Rk=logprobs_of(top_ids_Rk),
    )
