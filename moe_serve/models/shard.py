"""What one rank holds of a decoder: the one place that layers and loader both ask. Pure."""

from __future__ import annotations

import dataclasses

from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.models.spec import AttentionSpec
from moe_serve.parallel.layout import SINGLE_RANK, RankLayout
from moe_serve.parallel.shard import HeadShard, Span, split, split_heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """The slice rules, one a kind of weight. A rule gives the part along the sharded dimension.

    | weight                     | sharded along         | rule                          |
    |----------------------------|-----------------------|-------------------------------|
    | embedding, LM head         | vocabulary (rows)     | `vocab`                       |
    | q, k, v                    | heads (rows)          | `heads`                       |
    | attention output           | heads (columns)       | `output_columns`              |
    | dense gate and up          | inner (rows)          | `inner`                       |
    | dense down                 | inner (columns)       | `down_columns`                |
    | experts, expert-parallel   | experts               | `experts`, `expert_inner` all |
    | experts, otherwise         | inner, as dense       | all experts, `expert_inner`   |
    | norms, router, shared      | not at all            |                               |

    Deterministic ranks hold output and down projections whole: these run on a token slice, on
    all columns, so that no sum crosses ranks.

    `placement`: where experts lie with expert parallelism; it counts MoE layers from 0.
    """

    layout: RankLayout = SINGLE_RANK
    placement: Placement | None = None

    def vocab(self, vocab_size: int) -> Span:
        return self._split(vocab_size)

    def heads(self, spec: AttentionSpec) -> HeadShard:
        layout = self.layout
        return split_heads(spec.num_heads, spec.num_kv_heads, layout.lane_rank, layout.tensor_size)

    def output_columns(self, spec: AttentionSpec) -> Span:
        if self.layout.deterministic:
            return Span(0, spec.q_size)
        return self.heads(spec).heads.scaled(spec.head_dim)

    def inner(self, inner_size: int) -> Span:
        return self._split(inner_size)

    def down_columns(self, inner_size: int) -> Span:
        return Span(0, inner_size) if self.layout.deterministic else self._split(inner_size)

    def experts(self, moe_index: int, num_experts: int) -> tuple[int, ...]:
        """Logical experts of this rank in that MoE layer, in the order of its bank."""
        if not self.layout.expert_parallel:
            return tuple(range(num_experts))
        return self.layer_placement(moe_index, num_experts).experts[self.layout.rank]

    def expert_inner(self, inner_size: int) -> Span:
        """Rows of each expert's gate and of its up projection."""
        return Span(0, inner_size) if self.layout.expert_parallel else self.inner(inner_size)

    def expert_down_columns(self, inner_size: int) -> Span:
        return Span(0, inner_size) if self.layout.expert_parallel else self.down_columns(inner_size)

    def layer_placement(self, moe_index: int, num_experts: int) -> LayerPlacement:
        """Linear, unless it was chosen."""
        if self.placement is None:
            return Placement.make(1, num_experts, self.layout.expert_size).layers[0]
        return self.placement.layers[moe_index]

    def _split(self, size: int) -> Span:
        return split(size, self.layout.lane_rank, self.layout.tensor_size)


WHOLE_MODEL = ModelShard()
