"""What the client is told of a request after a step."""

from __future__ import annotations

from moe_serve.errors import LogitsError
from moe_serve.messages import FinishReason, RequestUpdate, TokenLogprobs
from moe_serve.request import Request
from moe_serve.step import Chunk, SampledToken
from moe_serve.token_routes import TokenRoutes


def collect_prompt_logprobs(
    chunk: Chunk, entries: list[TokenLogprobs]
) -> list[TokenLogprobs | None] | None:
    """Keep the entries of positions not seen before; returns all, once, when the prompt is done.

    To be called before the chunk's token is appended, where somebody wants them. None: not
    complete, or told before.
    """
    request = chunk.request
    collected = request.prompt_logprobs
    assert collected is not None
    # Entry i is of position start + 1 + i. After a preemption the first ones come again.
    num_known = max(0, len(collected) - (chunk.start + 1))
    collected += entries[num_known:]
    if chunk.stop != request.num_prompt_tokens or request.output_token_ids:
        return None
    assert len(collected) == request.num_prompt_tokens, "prompt logprobs are missing"
    return collected


def collect_routes(chunk: Chunk, routes: TokenRoutes | None) -> None:
    """Keep the routes of positions not seen before, where somebody wants them. After a preemption
    the first ones come again, as they were."""
    request = chunk.request
    assert routes is not None and chunk.start <= request.num_routes, "routes are missing"
    if chunk.stop > request.num_routes:
        new = routes.between(request.num_routes - chunk.start, chunk.num_tokens)
        request.untold_routes.append(new)
        request.num_routes = chunk.stop


def _take_routes(request: Request) -> TokenRoutes | None:
    if not request.untold_routes:
        return None
    parts, request.untold_routes = request.untold_routes, []
    return TokenRoutes.join(parts)


def make_update(
    request: Request,
    *,
    sampled: SampledToken | None = None,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
    error: LogitsError | None = None,
) -> RequestUpdate:
    logprobs = sampled.logprobs if sampled is not None else None
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=[] if sampled is None else [sampled.token_id],
        logprobs=None if logprobs is None else [logprobs],
        prompt_logprobs=prompt_logprobs,
        routes=_take_routes(request),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=None if error is None else str(error),
        is_client_fault=error is not None and error.is_client_fault,
        num_cached_tokens=request.num_cached_tokens,
        scheduled_time=request.scheduled_time,
        first_token_time=request.first_token_time,
    )
