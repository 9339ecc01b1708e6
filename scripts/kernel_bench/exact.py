"""The first promise: a row has the same bits alone, in company, and wherever it stands."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernel_bench.attention import BLOCK_SIZE, FP8, Heads, Pool, Span
from kernel_bench.case import BF16, FP32, ExactCase
from kernel_bench.gemm import Matrix, Rows, make_rows, matrices, multiply, projections, weights
from kernel_bench.inputs import normal, spread_evenly
from kernel_bench.shapes import Model
from moe_serve.kernels.linear import linear

# Shapes: T tokens, R rows sorted by expert, D in, E experts, H heads, h head_dim.

_NUM_PROBES = 8
_LENGTHS = (1, 17, 500, 513, 1030, 4096)


def cases(models: Sequence[Model], company: Sequence[int]) -> Iterator[ExactCase]:
    """`company`: how many tokens a row meets."""
    for model in models:
        if model.num_heads:
            yield from _attention_cases(model, company)
    for model in models:
        for storage in model.formats:
            for matrix in matrices(model):
                yield ExactCase(
                    f"experts {storage}: {matrix.name}",
                    f"{model.name} {matrix.num_columns}->{matrix.num_rows}{model.share}",
                    functools.partial(_experts_agree, model, storage, matrix, company),
                )
        for name, (num_rows, width), dtype in projections(model):
            if name != "head":
                yield ExactCase(
                    f"linear {'fp32' if dtype == FP32 else 'bf16'}: {name}",
                    f"{model.name} {width}->{num_rows}",
                    functools.partial(_linear_agrees, num_rows, width, dtype, company),
                )


def _attention_cases(model: Model, company: Sequence[int]) -> Iterator[ExactCase]:
    name = f"{model.name} {model.num_heads}/{model.num_kv_heads}x{model.head_dim}"
    for is_windowed in (False, True)[: 1 + (model.window is not None)]:
        for dtype in (BF16, FP8):
            shape = name + ", fp8 KV" * (dtype == FP8) + f", window {model.window}" * is_windowed
            check = functools.partial(_attention_agrees, model, dtype, is_windowed, company)
            yield ExactCase("attention: decode, prefill", shape, check)


def _experts_agree(
    model: Model, storage: str, matrix: Matrix, company: Sequence[int], device: torch.device
) -> bool:
    """Each alone, and each put at a random place among the rows of its expert."""
    weight = weights(model.num_experts_here, *matrix[1:3], storage, device)
    probes = make_rows(model, matrix.num_columns, _NUM_PROBES, device)
    alone = []
    for row, expert in enumerate(probes.experts):
        counts_E = torch.zeros_like(probes.counts_E)
        counts_E[expert] = 1
        alone.append(multiply(probes.x_RD[row : row + 1], weight, counts_E, matrix.is_gated))
    for count in company:
        rows = make_rows(model, matrix.num_columns, count, device)
        x_RD, places = _insert(probes, rows)
        counts_E = rows.counts_E + probes.counts_E
        found = multiply(x_RD, weight, counts_E, matrix.is_gated)[places]
        if not torch.equal(found, torch.cat(alone)):
            return False
    return True


def _insert(probes: Rows, rows: Rows) -> tuple[Tensor, list[int]]:
    """Rows of both, sorted by expert; where those of `probes` stand, at random among their own."""
    experts = torch.tensor([*rows.experts, *probes.experts])
    jumbled = torch.randperm(len(experts))
    order = jumbled[experts[jumbled].sort(stable=True).indices]
    x_RD = torch.cat((rows.x_RD, probes.x_RD))[order.to(rows.x_RD.device)]
    return x_RD, order.argsort()[len(rows.experts) :].tolist()


def _linear_agrees(
    num_rows: int, width: int, dtype: torch.dtype, company: Sequence[int], device: torch.device
) -> bool:
    weight_ND = normal(num_rows, width, device=device, dtype=dtype, scale=width**-0.5)
    for count in company:
        x_TD = normal(count, width, device=device, dtype=dtype)
        checked = spread_evenly(count, _NUM_PROBES)
        alone = torch.cat([linear(x_TD[row : row + 1], weight_ND) for row in checked])
        turned = linear(x_TD.flip(0), weight_ND).flip(0)
        for found in (linear(x_TD, weight_ND), turned):
            if not torch.equal(found[checked], alone):
                return False
    return True


def _attention_agrees(
    model: Model,
    dtype: torch.dtype,
    is_windowed: bool,
    company: Sequence[int],
    device: torch.device,
) -> bool:
    """The last token of each sequence: alone, among other decodes, at the end of a prompt's chunk,
    and of a chunk that others decode beside."""
    heads = Heads.of(model, device, is_windowed=is_windowed)
    most = max(company)
    lengths = [min(length, most) for length in _LENGTHS]
    others = [1 + 37 * i % min(most, 40 * BLOCK_SIZE) for i in range(min(company))]
    pool = Pool(heads, [*lengths, *others], dtype, device)
    # One query for each position of each sequence: the last ones are what is compared.
    q_PHh = normal(most + 1, model.num_heads, model.head_dim, device=device)

    def run(spans: Sequence[Span]) -> list[Tensor]:
        q_THh = torch.cat([q_PHh[span.start : span.stop] for span in spans])
        found = pool.attend(q_THh, pool.context(spans))
        return [part[-1] for part in found.split([span.stop - span.start for span in spans])]

    decodes = [Span(i, length - 1, length) for i, length in enumerate(lengths)]
    beside = [Span(len(lengths) + i, length - 1, length) for i, length in enumerate(others)]
    expected = [run([span])[0] for span in decodes]
    chunks = [span._replace(start=0) for span in decodes]
    later = [span._replace(start=span.stop // 2) for span in decodes if span.stop > 2]
    for found, wanted in (
        (run([*beside, *decodes])[len(beside) :], expected),
        (run([*decodes, *beside])[: len(decodes)], expected),
        (run(chunks[1:]), expected[1:]),
        (run([*beside, *later])[len(beside) :], expected[len(expected) - len(later) :]),
    ):
        if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            return False
    return True
