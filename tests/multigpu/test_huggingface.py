"""Hugging Face models sharded over GPUs. Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`.

Every all-reduce that reaches a norm is fused, also where a fusion was asked for by name, and the logits are those of the
eager model to within bf16.
"""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # torchrun puts this file's folder there

import tpfuse
from tests.multigpu.checks import SHARED
from tpfuse.models.families import build_sharded, family_config
from tpfuse.testing import spawn, under_torchrun

FUSION = "fuse_allreduce_rms"
#: Family -> (all-reduces that reach a norm, merged).
FAMILIES = {"llama": (4, 0), "qwen3": (4, 0), "gemma3": (5, 0), "deepseek_v3": (2, 1)}
#: Also compiled as CUDA graphs, which hold NCCL's calls.
GRAPHED = ("llama", "deepseek_v3")


def _logits(run, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return run(ids, use_cache=False).logits.clone()


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest logit."""
    return ((got.float() - expected.float()).abs().max() / expected.abs().max()).item()


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
        tpfuse.apply(model, {FUSION: True}, strict=True, fullgraph=True)
        got = [_logits(model, ids) for _ in range(3)]
        report = tpfuse.explain(model)
        tpfuse.remove(model)
        fused = [site for site in report.sites if site.outcome == "fused"]
        found[family] = {
            "error": _error(got[0], eager),
            "repeats": all(torch.equal(got[0], g) for g in got[1:]),
            "merged": report.count(FUSION, "merged") == merged,
            "fused": report.count(FUSION) == reaching,
            "kernels": all(site.kernel not in ("", "reference") for site in fused),
            "arena": "arena of 64 MiB" in str(report),
        }
        if family in GRAPHED and not SHARED:
            tpfuse.apply(model, mode="reduce-overhead", fullgraph=True)
            errors = [_error(_logits(model, ids), eager) for _ in range(4)]
            found[family]["reduce-overhead"] = max(errors, key=lambda error: (error != error, error))  # NaN is the largest
            found[family]["fused in graphs"] = tpfuse.explain(model).count(FUSION) == reaching
            tpfuse.remove(model)
    return found


def _check(found: dict[str, dict]) -> None:
    for family, values in found.items():
        limits = {"error": 0.05, "reduce-overhead": 0.05}
        wrong = {k: v for k, v in values.items() if (not v <= limits[k] if k in limits else not v)}
        assert not wrong, f"{family}: {wrong}"


@pytest.mark.gpu
def test_families():
    for found in spawn(_run, 2, backend="cuda", timeout_s=280):
        _check(found)


def _generation(rank: int) -> dict[str, bool]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = build_sharded(family_config("llama", num_hidden_layers=2), mesh, torch.float32)
    ids = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(1)).cuda()
    plain = [_generate(model, ids), _generate(model, ids, cache_implementation="static", disable_compile=True)]
    tpfuse.apply(model)
    torch._dynamo.utils.counters.clear()
    got = [_generate(model, ids), _generate(model, ids, cache_implementation="static")]
    modes = {key for *_, key in model._compiled_call_impl._callables}
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    tpfuse.remove(model)
    return {
        "decode runs as CUDA graph": skips == 0,
        "dynamic": torch.equal(got[0], plain[0]),
        "static": torch.equal(got[1], plain[1]),
        "took over reduce-overhead": any("reduce-overhead" in key for key in modes),
    }


@pytest.mark.gpu
@pytest.mark.nccl
def test_generate():
    for found in spawn(_generation, 2, backend="cuda", timeout_s=280):
        assert found == dict.fromkeys(found, True)


if __name__ == "__main__":
    under_torchrun(lambda rank: _check(_run(rank)))
