"""Hugging Face causal LMs sharded over two CPU ranks: same logits, same tokens, every all-reduce accounted for.

Three families with graphs run by an interpreter, and one with the real Inductor. All families: benchmarks/families.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse.models.families import build, build_sharded, family_config
from tpfuse.testing import interpret_graphs, spawn

FUSION = "fuse_allreduce_rms"
FP32 = 1e-5
#: Family -> (fused, merged, left) all-reduces of its two layers.
EXPECTED = {"llama": (4, 0, 0), "gemma3": (5, 0, 0), "deepseek_v3": (2, 1, 0)}
TOKENS = [(1, 1), (1, 2), (1, 3), (1, 5), (1, 7), (2, 8), (1, 64), (1, 129), (2, 33)]


def _model(family: str, **overrides):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return build_sharded(family_config(family, **overrides), mesh, torch.float32)


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(length))


def _logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def _generate(model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs)


def _family(rank: int, family: str) -> dict[str, object]:
    with interpret_graphs():
        model, whole = _model(family), build(family_config(family), "cpu", torch.float32)
        ids = _ids(2, 16)
        plain, expected = _logits(model, ids), _logits(whole, ids)
        tokens, static = _generate(model, ids), _generate(model, ids, cache_implementation="static")
        hooks = [len(m._backward_hooks) for m in model.modules()]
        tpfuse.apply(model, fullgraph=True)
        got = _logits(model, ids)
        report = tpfuse.explain(model)
        sites = [s for s in report.sites if s.op == "all_reduce"]
        modules = dict(model.named_modules())
        found = {
            "sharded": (got - plain).abs().max().item(),
            "unsharded": (got - expected).abs().max().item(),
            "counts": tuple(report.count(FUSION, o) for o in ("fused", "merged")),
            "left": len([s for s in sites if s.outcome == "skipped"]),
            "places": all(site.where in modules for site in report.sites),
            "reasons": all(site.reason for site in report.sites if site.outcome != "fused"),
            "graphs": report.graphs,
            "tokens": torch.equal(_generate(model, ids), tokens),
            "static": torch.equal(_generate(model, ids, cache_implementation="static"), static),
            "hooks kept": [len(m._backward_hooks) for m in model.modules()] == hooks,
            "fused after generate": tpfuse.explain(model).count(FUSION),
            "copy": torch.equal(_logits(copy.deepcopy(model), ids), plain) if family == "llama" else True,
        }
        tpfuse.remove(model)
        found["removed"] = torch.equal(_logits(model, ids), plain) and "get_compiled_call" not in vars(model)
    return found


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "llama")) for f in EXPECTED])
def test_family(family):
    fused, merged, left = EXPECTED[family]
    for found in spawn(_family, 2, family, timeout_s=280):
        assert found["sharded"] < FP32 and found["unsharded"] < FP32
        assert found["counts"] == (fused, merged) and found["left"] == left
        assert found["graphs"] == 1 and found["places"] and found["reasons"]
        assert found["tokens"] and found["static"] and found["copy"] and found["removed"]
        assert found["hooks kept"]
        assert found["fused after generate"] == fused  # prefill, decode and every shape: still the same places


def _per_layer(rank: int) -> tuple[float, list[int], list[int]]:
    """Each layer applied by itself: one of its two all-reduces has its norm in the next layer."""
    with interpret_graphs():
        model = _model("llama")
        plain = _logits(model, _ids(1, 9))
        for layer in model.model.layers:
            tpfuse.apply(layer)
        error = (_logits(model, _ids(1, 9)) - plain).abs().max().item()
        reports = [tpfuse.explain(layer) for layer in model.model.layers]
        return error, [r.count(FUSION) for r in reports], [r.count(FUSION, "skipped") for r in reports]


@pytest.mark.slow
def test_layers_compiled_one_by_one():
    for error, fused, _ in spawn(_per_layer, 2, timeout_s=200):
        assert error < FP32 and fused == [1, 1]


def _inductor(rank: int, folder: str) -> dict[str, object]:
    import os

    from transformers import CompileConfig

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    counters = torch._dynamo.utils.counters
    model = _model("llama", num_hidden_layers=1)
    expected = {shape: _logits(model, _ids(*shape)) for shape in TOKENS}
    plain_tokens = _generate(model, _ids(1, 9))
    counters.clear()
    plain = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="aot_eager")
    with torch.no_grad():
        for shape in TOKENS:
            plain(_ids(*shape))
    plain_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    tpfuse.apply(model, fullgraph=True)
    errors = [(_logits(model, _ids(*shape)) - expected[shape]).abs().max().item() for shape in TOKENS]
    graphs = counters["stats"]["unique_graphs"]
    # Where Hugging Face would compile the decode step itself, tpfuse compiles it in the mode it would have used.
    compile_config = CompileConfig()
    compile_config._compile_all_devices = True
    tokens = _generate(model, _ids(1, 9), cache_implementation="static", compile_config=compile_config)
    modes = {key for *_, key in model._compiled_call_impl._callables}
    return {
        "error": max(errors),
        "graphs": (graphs, plain_graphs),
        "tokens": torch.equal(tokens, plain_tokens),
        "mode": any("reduce-overhead" in key for key in modes),
        "fused": tpfuse.explain(model).count(FUSION),
    }


@pytest.mark.slow
def test_inductor_over_many_shapes_and_generate(tmp_path):
    for found in spawn(_inductor, 2, str(tmp_path), timeout_s=290):
        assert found["error"] < FP32
        assert found["graphs"][0] <= found["graphs"][1]
        assert found["tokens"] and found["mode"] and found["fused"] == 2
