"""Runs one step of the model on one rank: its lane's plan in, tokens out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from moe_serve.batch import Batch, build_batch
from moe_serve.context import LayerKV
from moe_serve.decode_graphs import Capture, DecodeGraphs
from moe_serve.errors import LogitsError
from moe_serve.experts.load import ExpertLoad
from moe_serve.logprobs import prompt_logprobs
from moe_serve.messages import TokenLogprobs
from moe_serve.models.decoder import Decoder
from moe_serve.parallel.comm_log import GroupCommunication
from moe_serve.route_capture import RouteCapture
from moe_serve.sampler import Sampler, SamplingRow
from moe_serve.step import Chunk, ChunkResult, SampledToken, StepPlan
from moe_serve.token_routes import TokenRoutes
from moe_serve.upload import to_device

# Prompt positions whose logits exist at once.
LOGIT_ROWS = 128

# Shapes: T tokens of the step, D model, S sampled rows, V vocabulary.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One entry per chunk; `failures`: request id -> why that request alone cannot go on."""

    results: list[ChunkResult]
    failures: dict[str, LogitsError]


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        pool: Sequence[LayerKV],
        sampler: Sampler,
        load: ExpertLoad,
        device: torch.device,
    ) -> None:
        self.model = model
        self.pool = pool
        self.sampler = sampler
        self.load = load
        self.device = device
        self.block_size = pool[0].keys_BsNh.shape[1]
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_graphs(
        self, max_num_seqs: int, max_model_len: int, capture: Capture
    ) -> Iterator[float]:
        """From now on replay decode steps of up to `max_num_seqs` requests; yields the share done.

        Only where one rank is the whole engine.
        """
        graphs = DecodeGraphs(
            self.model,
            self.pool,
            self.load,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            capture=capture,
        )
        for done, _ in enumerate(graphs.capture_all(), start=1):
            yield done / len(graphs.sizes)
        self.graphs = graphs

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult | None:
        """`plan`: the chunks of this rank's lane, perhaps none. None: the lane's leader answers.

        All ranks of all lanes run the same step together.
        """
        batch = build_batch(plan, self.block_size, self.device)
        hidden_TD, routes = self._forward(plan, batch)
        starts = batch.context.query_starts
        sampled = self._sample(plan, hidden_TD, starts)
        failures: dict[str, LogitsError] = {}
        results = []
        for row, chunk in enumerate(plan.chunks):
            token = sampled.get(row)
            entries = None
            if chunk.request.sampling.prompt_logprobs is not None:
                entries = self._prompt_logprobs(chunk, hidden_TD[starts[row] :])
            for outcome in (token, entries):
                if isinstance(outcome, LogitsError):
                    failures[chunk.request.request_id] = outcome
            results.append(
                ChunkResult(
                    sampled=None if isinstance(token, LogitsError) else token,
                    prompt_logprobs=None if isinstance(entries, LogitsError) else entries,
                    routes=routes and routes.between(starts[row], starts[row + 1]),
                )
            )
        if not self.model.ranks.layout.is_lane_leader:
            return None
        return StepResult(results=results, failures=failures)

    def _forward(self, plan: StepPlan, batch: Batch) -> tuple[torch.Tensor, TokenRoutes | None]:
        """Final hidden states, and the routes of the lane's tokens where the plan records them."""
        # A graph keeps no routes: those steps are rare enough to be launched in full.
        if self.graphs is not None and not plan.records_routes:
            hidden_TD = self.graphs.run(batch)
            if hidden_TD is not None:
                return hidden_TD, None
        capture = RouteCapture(self.model, plan.num_tokens) if plan.records_routes else None
        hidden_TD = self.model(
            batch.token_ids_T,
            batch.context,
            self.pool,
            self.load,
            plan.num_tokens_of_lanes,
            None if capture is None else capture.ids_LtK,
        )
        return hidden_TD, None if capture is None else capture.collect()

    def forget_warm_up(self, num_blocks: int) -> None:
        """Wipe what steps so far left in the load counters, in the groups' logs and in the pool's
        first blocks.
        """
        self.load.clear()
        self.model.ranks.lane.log.clear()
        self.model.ranks.experts.log.clear()
        for kv in self.pool:
            kv.keys_BsNh[:num_blocks].zero_()
            kv.values_BsNh[:num_blocks].zero_()

    def communication(self) -> list[GroupCommunication]:
        """What this rank's groups have moved; nothing where it is alone."""
        ranks = self.model.ranks
        groups = {"lane": ranks.lane, "experts": ranks.experts}
        return [group.communication(name) for name, group in groups.items() if group.size > 1]

    def _sample(
        self, plan: StepPlan, hidden_TD: torch.Tensor, starts: list[int]
    ) -> dict[int, SampledToken | LogitsError]:
        """By chunk number, for the chunks that sample. Nothing where another rank does it."""
        rows = [row for row, chunk in enumerate(plan.chunks) if chunk.samples]
        if not rows:
            return {}
        hidden_SD = hidden_TD
        # In a step of decodes alone every token is its chunk's last.
        if len(rows) < plan.num_tokens:
            last = [starts[row + 1] - 1 for row in rows]
            hidden_SD = hidden_TD[to_device(last, torch.int64, self.device)]
        logits_SV = self.model.logits(hidden_SD)
        if logits_SV is None:
            return {}
        requests = [plan.chunks[row].request for row in rows]
        tokens = self.sampler(
            logits_SV,
            [
                SamplingRow(
                    params=request.sampling,
                    seed=request.seed,
                    prompt_token_ids=request.prompt_token_ids,
                    output_token_ids=request.output_token_ids,
                )
                for request in requests
            ],
        )
        return dict(zip(rows, tokens, strict=True))

    def _prompt_logprobs(
        self, chunk: Chunk, hidden_TD: torch.Tensor
    ) -> list[TokenLogprobs] | LogitsError:
        """Of the prompt tokens that the chunk's positions predict, for a request that asks."""
        num_top = chunk.request.sampling.prompt_logprobs
        assert num_top is not None
        prompt = chunk.request.prompt_token_ids
        targets = prompt[chunk.start + 1 : chunk.stop + 1]
        entries: list[TokenLogprobs] = []
        failure: LogitsError | None = None
        # In blocks: the logits of a whole chunk over a large vocabulary would take gigabytes.
        for start in range(0, len(targets), LOGIT_ROWS):
            some = targets[start : start + LOGIT_ROWS]
            # After a failure too: the other ranks of the lane do not know of it.
            logits_TV = self.model.logits(hidden_TD[start : start + len(some)])
            if logits_TV is None or failure is not None:
                continue
            try:
                entries += prompt_logprobs(logits_TV, some, num_top)
            except LogitsError as error:
                failure = error
        return failure or entries
