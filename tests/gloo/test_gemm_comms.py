"""A model that is sequence-parallel by DTensor, by a plan like torchtitan's: its collectives join its GEMMs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpfuse
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow

D, H, V = 16, 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(D), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, H), nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(V, D), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _sharded(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def _titan(rank: int, batch: int) -> dict[str, object]:
    torch.manual_seed(0)
    whole = Model()
    model = Model()
    model.load_state_dict(whole.state_dict())
    model = _sharded(model)
    ids = torch.randint(0, V, (batch, 8), generator=torch.Generator().manual_seed(batch))
    with torch.no_grad(), interpret_graphs() as graphs:
        expected = whole(ids)
        tpfuse.apply(model, {"fuse_gemm_comms": True}, fullgraph=True)
        got = model(ids)
        targets = [node.target for node in graphs[0].graph.nodes]
    ops = torch.ops.tpfuse
    return {
        "error": (got - expected).abs().max().item(),
        "joined": (targets.count(ops.matmul_reduce_scatter.default), targets.count(ops.all_gather_matmul.default)),
        "report": str(tpfuse.explain(model)),
    }


def _batches(rank: int) -> list[dict[str, object]]:
    return [_titan(rank, batch) for batch in (1, 3)]


def test_sequence_parallel_by_dtensor():
    """Two down projections scatter; two blocks and the head gather, once for both GEMMs of a block."""
    for both in spawn(_batches, 2, timeout_s=120):
        for found in both:
            assert found["error"] < 1e-5 and found["joined"] == (2, 3), found
            assert "reduce_scatter" in found["report"]


def _stack(rank: int) -> dict[str, object]:
    from tests.gloo.layers import Stack

    class Normed(Stack):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, residual)[0]

    model = Normed(dist.group.WORLD, layers=2)
    config = {"enable_sp": True, "fuse_gemm_comms": True, "sp_min_token_num": 6}
    shapes, errors = [(8,), (3,), (2, 5), (7,), (5,)], []
    with torch.no_grad(), interpret_graphs():
        tpfuse.apply(model, config)
        for shape in shapes:
            errors.append((model(*model.inputs(*shape)) - model.unsharded(*shape)[0]).abs().max().item())
    report = tpfuse.explain(model)
    fused: dict[str, dict[str, int]] = {}
    for site in report.sites:
        if site.outcome == "fused":
            fused.setdefault(site.variant, {}).setdefault(f"{site.fusion} {site.op}", 0)
            fused[site.variant][f"{site.fusion} {site.op}"] += 1
    return {"error": max(errors), "fused": fused, "seconds": report.compile_seconds}


def test_few_and_many_rows():
    """Two variants, picked by the call: all-reduces with their norms below six rows, else sharded rows and joined GEMMs."""
    for found in spawn(_stack, 2, timeout_s=120):
        assert found["error"] < 1e-4, found
        assert found["seconds"].keys() == {"rows<6", "rows>=6"} and min(found["seconds"].values()) > 0
        few, many = found["fused"]["rows<6"], found["fused"]["rows>=6"]
        assert few == {"fuse_allreduce_rms all_reduce": 2}
        assert many["enable_sp all_reduce"] == 2 and many["fuse_gemm_comms reduce_scatter"] == 2, many
        assert many["fuse_gemm_comms all_gather"] >= 1, many
