"""Rows that are sharded and quantised behind a norm are gathered as FP8, with their scales, and by GEMMs that read them.

Graphs alone: ranks of a fake group have other numbers. tests/gloo/test_fp8.py has those.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.graphs import all_reduce, compile_with_tpfuse
from tests.unit.test_quantize_fp8 import (
    BF16,
    E4M3,
    bf16,
    compressed_tensors,
    norm,
    one_process,  # noqa: F401
    torchao_group,
    torchao_row,
    torchao_tensor,
)
from tpfuse.graph.nodes import ALL_GATHER, arguments
from tpfuse.ops.all_gather_matmul import OP as ALL_GATHER_MATMUL

T, D, N = 8, 96, 64
SCALED_MM, AMAX = torch.ops.aten._scaled_mm.default, torch.ops.aten.amax.default
SHARDED, JOINED = {"enable_sp": True}, {"enable_sp": True, "fuse_gemm_comms": True}
ROWS = {"torchao": torchao_row, "compressed-tensors": compressed_tensors}


def weight(seed):
    """[D, N] in FP8, column by column, and its scales [1, N]."""
    full = bf16(N, D, seed=seed).float()
    scale = full.abs().amax(1, keepdim=True) / 448
    return (full / scale).to(E4M3).t(), scale.t().contiguous()


def compiled(quantise, config, rows=T, readers=2):
    weights = [weight(seed) for seed in range(3, 3 + readers)]

    def model(x, r, w, *flat):
        y = norm(r + all_reduce(x), w)
        outputs = []
        for matrix, scale in zip(flat[::2], flat[1::2], strict=True):
            values, scales = quantise(y)
            if scales.numel() == 1:
                scale = scale[:, 0].contiguous()
            outputs.append(torch._scaled_mm(values, matrix, scales.view(-1, 1), scale.view(1, -1), out_dtype=BF16))
        return outputs

    inputs = bf16(rows, D), bf16(rows, D, seed=1), bf16(D, seed=2)
    return compile_with_tpfuse(model, *inputs, *(each for pair in weights for each in pair), config=config)


def gathered(run):
    return [node.meta["val"].dtype for node in run.calls(ALL_GATHER)]


@pytest.mark.parametrize("rows", [T, T - 1])
@pytest.mark.parametrize("name", ROWS)
def test_values_and_scales_are_gathered_once_for_all_readers(name, rows):
    run = compiled(ROWS[name], SHARDED, rows)
    assert sorted(map(str, gathered(run))) == ["torch.float32", "torch.uint8"]
    assert len(run.calls(SCALED_MM)) == 2 and len(run.calls(AMAX)) == 1
    (amax,) = run.calls(AMAX)
    assert amax.meta["val"].shape == (-(-rows // 2), 1)  # of this rank's rows


@pytest.mark.parametrize("rows", [T, T - 1])
@pytest.mark.parametrize("name", ROWS)
def test_by_the_gemms_that_read_them(name, rows):
    run = compiled(ROWS[name], JOINED, rows)
    (node,) = run.calls(ALL_GATHER_MATMUL)
    assert not run.calls(ALL_GATHER) and not run.calls(SCALED_MM)
    given = arguments(node)
    assert given["input"].meta["val"].dtype is E4M3 and given["input"].meta["val"].shape == (-(-rows // 2), D)
    assert given["input_scale"].meta["val"].shape == (-(-rows // 2), 1)
    assert len(given["weights"]) == len(given["weight_scales"]) == 2 and given["rows"] == rows
    (site,) = (site for site in run.report.sites if site.op == "all_gather")
    assert site.outcome == "fused"  # and nothing is told of the scales' own gather


def test_a_scale_of_all_rows_is_not_hoisted():
    run = compiled(torchao_tensor, JOINED)
    assert torch.uint8 not in gathered(run) and not run.calls(ALL_GATHER_MATMUL) and len(run.calls(SCALED_MM)) == 2


def test_scales_that_are_not_gathered_alike():
    """One reader's scale is made of all rows, behind the gather: the GEMMs stay."""

    def model(x, r, w, matrix, scale):
        values, scales = torchao_row(norm(r + all_reduce(x), w))
        return torch._scaled_mm(values, matrix, scales.flip(0).contiguous(), scale, out_dtype=BF16)

    run = compile_with_tpfuse(model, bf16(T, D), bf16(T, D, seed=1), bf16(D, seed=2), *weight(3), config=JOINED)
    assert len(run.calls(SCALED_MM)) == 1 and not run.calls(ALL_GATHER_MATMUL)
    assert any("not gathered in the same way" in site.reason for site in run.report.sites)


def test_groups_stay_whole():
    """Their scales have a shape of their own, which no row has: what is gathered is the norm."""

    def model(x, r, w):
        values, scales = torchao_group(norm(r + all_reduce(x), w))
        return values.float() @ torch.ones(D, 4), scales

    run = compile_with_tpfuse(model, bf16(T, D), bf16(T, D, seed=1), bf16(D, seed=2), config=SHARDED)
    assert torch.uint8 not in gathered(run)
