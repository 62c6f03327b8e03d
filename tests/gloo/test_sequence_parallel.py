"""Rows sharded between the all-reduces of a Hugging Face Llama, on CPU ranks: same logits, same tokens, any row count.

Once with graphs run by an interpreter and with its GEMMs joined, once with the real Inductor.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse.models.families import build, build_sharded, family_config
from tpfuse.ops.all_gather_matmul import OP as ALL_GATHER_MATMUL
from tpfuse.ops.matmul_reduce_scatter import OP as MATMUL_REDUCE_SCATTER
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow

FUSION = "enable_sp"
FP32 = 1e-5
#: All-reduces of two layers: they become reduce-scatters, and there are as many all-gathers of sharded rows.
REDUCES = 4
#: Rows: one; an odd number, in a batch.
SHAPES = [(1, 1), (3, 7)]
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def _model(**overrides):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return build_sharded(family_config("llama", **overrides), mesh, torch.float32)


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(length))


def _logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def _generate(model, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)


def _gathers_of_rows(graph: torch.fx.GraphModule) -> int:
    """All-gathers, those of a model's own sharded columns aside: they gather what a GEMM made."""
    gathers = [n for n in graph.graph.nodes if n.target is ALL_GATHER]
    return sum(n.meta.get("tpfuse_sharded", False) for n in gathers)


def _llama(rank: int) -> dict[str, object]:
    with interpret_graphs() as graphs:
        model, whole = _model(), build(family_config("llama"), "cpu", torch.float32)
        plain = {shape: _logits(model, _ids(*shape)) for shape in SHAPES}
        single = {shape: _logits(whole, _ids(*shape)) for shape in SHAPES}
        tokens = _generate(model, _ids(2, 9))
        tpfuse.apply(model, {FUSION: True, "fuse_gemm_comms": True}, fullgraph=True)
        got = {shape: _logits(model, _ids(*shape)) for shape in SHAPES}
        calls = [n.target for n in graphs[0].graph.nodes]
        report = tpfuse.explain(model)
        return {
            "sharded": max((got[s] - plain[s]).abs().max().item() for s in SHAPES),
            "unsharded": max((got[s] - single[s]).abs().max().item() for s in SHAPES),
            "counts": (calls.count(REDUCE_SCATTER), _gathers_of_rows(graphs[0]), calls.count(ALL_REDUCE)),
            "joined": (calls.count(MATMUL_REDUCE_SCATTER), calls.count(ALL_GATHER_MATMUL)),
            "fused": report.count(FUSION),
            "left": report.count(FUSION, "skipped"),
            "table": str(report),
            "graphs": report.graphs,
            "tokens": torch.equal(_generate(model, _ids(2, 9)), tokens),
            "fused after generate": tpfuse.explain(model).count(FUSION),
        }


def test_llama():
    """Each reduce-scatter with the GEMM before it, each gather with those behind it.

    More ranks and sizes, and all families: benchmarks/sequence_parallel.py.
    """
    for found in spawn(_llama, 2, timeout_s=280):
        assert found["sharded"] < FP32 and found["unsharded"] < FP32, found
        assert found["counts"] == (0, 0, 0) and found["joined"] == (REDUCES, REDUCES), found
        assert found["fused"] == found["fused after generate"] == REDUCES and found["left"] == 0
        assert f"{REDUCES} fused" in found["table"] and "reduce_scatter" in found["table"]
        assert found["tokens"]


def _inductor(rank: int, folder: str) -> dict[str, object]:
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    counters = torch._dynamo.utils.counters
    model = _model(num_hidden_layers=1)
    shapes = [(1, 3), (1, 2), (1, 8), (1, 129)]
    expected = {shape: _logits(model, _ids(*shape)) for shape in shapes}
    counters.clear()
    plain = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="aot_eager")
    with torch.no_grad():
        for shape in shapes:
            plain(_ids(*shape))
    plain_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    tpfuse.apply(model, {"enable_sp": True}, fullgraph=True)
    errors = [(_logits(model, _ids(*shape)) - expected[shape]).abs().max().item() for shape in shapes]
    return {
        "error": max(errors),
        "graphs": (counters["stats"]["unique_graphs"], plain_graphs),
        "fused": tpfuse.explain(model).count(FUSION),
    }


def test_inductor_over_many_shapes(tmp_path):
    """The second call makes the length dynamic, with one row a rank in it: no more graphs than without us."""
    for found in spawn(_inductor, 2, str(tmp_path), timeout_s=290):
        assert found["error"] < FP32
        assert found["graphs"][0] <= found["graphs"][1]
        assert found["fused"] == 2
