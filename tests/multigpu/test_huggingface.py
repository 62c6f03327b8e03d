"""Hugging Face models sharded over GPUs with NCCL. Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`.

Until there are kernels, a site that could be fused is lowered back on CUDA: numbers are then those of plain torch.compile,
bit for bit, and the report says why.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse import kernels
from tpfuse.models.families import build_sharded, family_config
from tpfuse.testing import spawn, under_torchrun

FUSION = "fuse_allreduce_rms"
#: Family -> (all-reduces that reach a norm, merged).
FAMILIES = {"llama": (4, 0), "qwen3": (4, 0), "gemma3": (5, 0), "deepseek_v3": (2, 1)}
HAS_KERNEL = kernels.name_for("all_reduce_rms_norm", "cuda") is not None


def _logits(run, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return run(ids, use_cache=False).logits.clone()


def _generate(model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs)


def _run(rank: int) -> dict[str, dict]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found: dict[str, dict] = {}
    for family, (reaching, merged) in FAMILIES.items():
        torch._dynamo.reset()
        model = build_sharded(family_config(family), mesh, torch.bfloat16)
        ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1)).cuda()
        eager = _logits(model, ids)
        bypassed = tpfuse.models.grad_hooks.bypass(model)
        plain = _logits(torch.compile(model._call_impl, fullgraph=True), ids)
        tpfuse.models.grad_hooks.restore(bypassed)
        told = _refused(model)
        torch._dynamo.reset()
        tpfuse.apply(model, fullgraph=True)
        got = [_logits(model, ids) for _ in range(3)]
        report = tpfuse.explain(model)
        unserved = [s for s in report.sites if s.op == "all_reduce" and "no kernel for cuda" in s.reason]
        scale = eager.abs().max().item()
        tpfuse.remove(model)
        tpfuse.apply(model, mode="reduce-overhead", fullgraph=True)
        graphed = [_logits(model, ids) for _ in range(4)]
        found[family] = {
            "error": (got[0].float() - eager.float()).abs().max().item() / scale,
            "bits of plain compile": merged or HAS_KERNEL or torch.equal(got[0], plain),
            "repeats": all(torch.equal(got[0], g) for g in got[1:]),
            "reduce-overhead": max((g.float() - eager.float()).abs().max().item() for g in graphed) / scale,
            "merged": report.count(FUSION, "merged") == merged,
            "sites": report.count(FUSION) + report.count(FUSION, "skipped") >= reaching,
            "reason": HAS_KERNEL or len(unserved) == reaching,
            "refused": HAS_KERNEL or "no kernel for cuda" in told,
        }
        tpfuse.remove(model)
    return found


def _refused(model) -> str:
    try:
        tpfuse.apply(model, {"fuse_allreduce_rms": True})
    except tpfuse.ConfigError as error:
        return str(error)
    tpfuse.remove(model)
    return ""


def _check(found: dict[str, dict]) -> None:
    for family, values in found.items():
        limits = {"error": 0.05, "reduce-overhead": 0.05}
        wrong = {k: v for k, v in values.items() if (v > limits[k] if k in limits else not v)}
        assert not wrong, f"{family}: {wrong}"


@pytest.mark.gpu
def test_families():
    for found in spawn(_run, 2, backend="nccl", timeout_s=280):
        _check(found)


def _generation(rank: int) -> dict[str, bool]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = build_sharded(family_config("llama", num_hidden_layers=2), mesh, torch.float32)
    ids = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(1)).cuda()
    plain = [_generate(model, ids), _generate(model, ids, cache_implementation="static", disable_compile=True)]
    tpfuse.apply(model)
    torch._dynamo.utils.counters.clear()
    got = [_generate(model, ids), _generate(model, ids, cache_implementation="static")]
    modes = {key for _, key in model._compiled_call_impl._callables}
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    tpfuse.remove(model)
    return {
        "decode runs as CUDA graph": skips == 0,
        "dynamic": torch.equal(got[0], plain[0]),
        "static": torch.equal(got[1], plain[1]),
        "took over reduce-overhead": any("reduce-overhead" in key for key in modes),
    }


@pytest.mark.gpu
def test_generate():
    for found in spawn(_generation, 2, backend="nccl", timeout_s=280):
        assert found == dict.fromkeys(found, True)


if __name__ == "__main__":
    under_torchrun(lambda rank: _check(_run(rank)))
