"""Models with FP8 activations on two CPU ranks: what is joined gives, bit for bit, what their own operations give.

A hand-written Llama-like stack, quantised per row, per group and by given scales.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpfuse
from tests.unit.test_quantize_fp8 import BF16, E4M3, cast, torchao_row
from tpfuse.graph.nodes import ALL_GATHER
from tpfuse.ops.all_gather_matmul import OP as ALL_GATHER_MATMUL
from tpfuse.ops.all_reduce_rms_norm import OP as FUSED
from tpfuse.ops.all_reduce_rms_norm_quantize_fp8 import OP as FP8_OP
from tpfuse.ops.matmul_reduce_scatter import OP as MATMUL_REDUCE_SCATTER
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow

FUSION = "fuse_allreduce_rms"
HIDDEN, INNER, GROUP, LAYERS = 128, 256, 32, 2
SHAPE = (3, 7)  # an odd number of rows


def _grouped(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = y.view(*y.shape[:-1], -1, GROUP)
    scale = (parts.abs().amax(-1, keepdim=True) / 448.0).float()
    return cast(parts.float() / scale).view(y.shape), scale.squeeze(-1)


def _static(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.full((1,), 0.02)
    return cast(y.float() / scale), scale


KINDS = {"row": torchao_row, "group": _grouped, "static": _static}


class Linear(nn.Module):
    """FP8 weights with a scale per column; of activations that it quantises itself, as its kind says."""

    def __init__(self, weight: torch.Tensor, kind: str) -> None:
        super().__init__()
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        self.register_buffer("weight", (weight.float() / scale).to(E4M3).t())
        self.register_buffer("scale", scale.t().contiguous())
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        values, scale = KINDS[self.kind](flat)
        if self.kind == "group":  # no kernel for these on a CPU
            wide = (values.float().view(*flat.shape[:-1], -1, GROUP) * scale.unsqueeze(-1)).view(flat.shape)
            product = (wide @ (self.weight.float() * self.scale)).to(BF16)
        else:
            rows = scale.expand(flat.shape[0], 1).contiguous() if self.kind == "static" else scale
            product = torch._scaled_mm(values, self.weight, rows, self.scale, out_dtype=BF16)
        return product.view(*x.shape[:-1], -1)


class Layer(nn.Module):
    def __init__(self, kind: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        gate, up = (torch.randn(INNER, HIDDEN) / HIDDEN**0.5 for _ in range(2))
        down = torch.randn(HIDDEN, INNER) / INNER**0.5
        part = lambda tensor, dim: tensor.tensor_split(group.size(), dim)[group.rank()].to(BF16)  # noqa: E731
        self.gate, self.up, self.down = (Linear(part(t, d), kind) for t, d in ((gate, 0), (up, 0), (down, 1)))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5, dtype=BF16)
        self.tp_group = group

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        y = self.norm(h)
        out = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        dist.all_reduce(out, group=self.tp_group)
        return h + out


class Stack(nn.Module):
    def __init__(self, kind: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(kind, group) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN, eps=1e-5, dtype=BF16), Linear(torch.randn(64, HIDDEN).to(BF16), kind)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def _inputs(shape: tuple[int, ...], poisoned: bool = False) -> torch.Tensor:
    x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)
    if poisoned:
        x[0, 0, 3] = torch.nan
    return x


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


def _stack(rank: int, kind: str, **given) -> dict[str, object]:
    cases = [(SHAPE, False), (SHAPE, True)]
    with interpret_graphs() as graphs, torch.no_grad():
        model = Stack(kind, dist.group.WORLD)
        plain = [model(_inputs(*case)) for case in cases]
        tpfuse.apply(model, given.get("config"), fullgraph=True, verify=given.get("verify"))
        got = [model(_inputs(*case)) for case in cases]
        calls = [node.target for graph in graphs[:1] for node in graph.graph.nodes]
        return {
            "same": list(map(_same, got, plain)),
            "off": max((g.float() - p.float()).abs().nan_to_num(0).max().item() for g, p in zip(got, plain, strict=True)),
            "joined": (calls.count(ALL_GATHER_MATMUL), calls.count(MATMUL_REDUCE_SCATTER), calls.count(ALL_GATHER)),
            "counts": (calls.count(FP8_OP), calls.count(FUSED), calls.count(torch.ops.aten.amax.default)),
            "fused": tpfuse.explain(model).count(FUSION),
            "table": str(tpfuse.explain(model)),
        }


def _stacks(rank: int) -> dict[str, dict[str, object]]:
    found = {kind: _stack(rank, kind, verify=1 if kind == "row" else None) for kind in KINDS}
    found["sharded"] = _stack(rank, "row", config={"enable_sp": True})
    found["joined"] = _stack(rank, "row", config={"enable_sp": True, "fuse_gemm_comms": True})
    return found


def test_stacks():
    for found in spawn(_stacks, 2, timeout_s=120):
        sharded, joined = found.pop("sharded"), found.pop("joined")
        assert all(sharded["same"]) and sharded["joined"] == (0, 0, 2 * LAYERS), sharded  # values, and scales
        # These products are scaled in an order of their own: some of the least values round otherwise.
        assert joined["off"] < 1e-3 and joined["joined"] == (LAYERS, LAYERS, 0), joined
        for kind, each in found.items():
            assert all(each["same"]), (kind, each)
            # What is left: the first norm, for each of its readers, and what goes into the row-parallel layers.
            assert each["counts"] == (LAYERS, 0, 0 if kind == "static" else LAYERS + 2), (kind, each)
            assert each["fused"] == LAYERS and "+fp8" in each["table"]
