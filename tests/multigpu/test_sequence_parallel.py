"""A Hugging Face Llama with sharded rows and joined GEMMs on GPUs, by our kernels and through Inductor.

Calls of few rows have neither, and norms in their all-reduces.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tpfuse
from tpfuse import tables
from tpfuse.kernels import dispatch
from tpfuse.kernels.matmul_candidates import MATMULS, OWN
from tpfuse.models.families import build_sharded, family_config
from tpfuse.tables import Choice, Machine, Table
from tpfuse.testing import spawn

CONFIG = {"enable_sp": True, "fuse_gemm_comms": True, "sp_min_token_num": 64}
FUSIONS = ("enable_sp", "fuse_gemm_comms", "fuse_allreduce_rms")
HIDDEN, VOCABULARY, REDUCES = 1024, 2048, 4
#: In this order: a graph for the first size, then one for any; the last has too few rows.
CALLS = ((1, 512), (1, 301), (3, 43), (1, 8))
LIMIT = 0.05  # of the largest logit


def choose_ours() -> None:
    """A tuned table by which our kernels compute every GEMM with a collective, whatever its rows."""
    machine = Machine(torch.cuda.get_device_name(), dispatch.link(), dist.get_world_size())
    tables.save(Table(machine, {op: {(HIDDEN, HIDDEN): ((1, Choice(OWN)),)} for op in MATMULS}, {}))
    dist.barrier()


def sharded_llama() -> torch.nn.Module:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    return build_sharded(family_config("llama", **sizes), mesh, torch.bfloat16)


def _logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits.float()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest logit."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def _llama(rank: int) -> dict[str, object]:
    choose_ours()
    model = sharded_llama()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randint(3, VOCABULARY, shape, generator=generator).cuda() for shape in CALLS]
    expected = [_logits(model, ids) for ids in inputs]
    tpfuse.apply(model, CONFIG, strict=True, fullgraph=True)
    got = [[_logits(model, ids) for ids in inputs] for _ in range(3)]  # a graph of any size may take over
    tpfuse.check()
    report = tpfuse.explain(model)
    fused = [site for site in report.sites if site.outcome == "fused"]
    return {
        "errors": [error(g, e) for run in got for g, e in zip(run, expected, strict=True)],
        "repeats": all(map(torch.equal, *got[1:])),
        "many": {name: len({s.where for s in fused if s.fusion == name and s.variant == "rows>=64"}) for name in FUSIONS},
        "few": {name: len({s.where for s in fused if s.fusion == name and s.variant == "rows<64"}) for name in FUSIONS},
        "kernels": {site.kernel for site in fused if site.fusion == "fuse_gemm_comms"},
        "table": str(report),
    }


def _gradients(model, ids: torch.Tensor, toward: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of one training step, this rank's parts of them."""
    model.zero_grad()
    (model(ids, use_cache=False).logits.float() * toward).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).float() for name, g in gradients.items()}


def _training(rank: int) -> dict[str, object]:
    choose_ours()
    model = sharded_llama()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (1, 301), generator=generator).cuda()
    toward = torch.randn(1, 301, VOCABULARY, generator=generator).cuda()
    expected = _gradients(model, ids, toward)
    tpfuse.apply(model, CONFIG, strict=True, fullgraph=True)
    got = [_gradients(model, ids, toward) for _ in range(2)]
    tpfuse.check()
    report = tpfuse.explain(model)
    fused = [site for site in report.sites if site.outcome == "fused"]
    return {
        "error": max(((got[1][name] - g).norm() / g.norm()).item() for name, g in expected.items()),
        "repeats": all(torch.equal(got[0][name], got[1][name]) for name in expected),
        "sharded": sum(site.fusion == "enable_sp" for site in fused),
        "kernels": {site.kernel for site in fused if site.fusion == "fuse_gemm_comms"},
        "joined": sum(site.fusion == "fuse_gemm_comms" for site in fused),
        "table": str(report),
    }


@pytest.mark.gpu
def test_training(tmp_path):
    """A step of Llama: all-reduces of the forward and the backward sharded, GEMMs of both joined."""
    for found in spawn(_training, 2, backend="cuda", timeout_s=280, env={"TPFUSE_CACHE_DIR": str(tmp_path)}):
        assert found["error"] <= LIMIT and found["repeats"], found
        assert found["sharded"] == 2 * REDUCES + 1 and found["kernels"] == {OWN}, found["table"]
        assert found["joined"] == 4 * REDUCES + 1, found["table"]


@pytest.mark.gpu
def test_llama(tmp_path):
    """Each reduce-scatter with the GEMM before it, each gather with those behind it; below 64 rows norms are fused."""
    for found in spawn(_llama, 2, backend="cuda", timeout_s=280, env={"TPFUSE_CACHE_DIR": str(tmp_path)}):
        assert all(error <= LIMIT for error in found["errors"]), found["errors"]
        assert found["repeats"]
        assert found["kernels"] == {OWN}, found["table"]
        assert found["many"]["enable_sp"] == REDUCES and found["few"]["fuse_allreduce_rms"] == REDUCES, found["table"]
        assert found["many"]["fuse_gemm_comms"] and not found["few"]["enable_sp"], found["table"]
