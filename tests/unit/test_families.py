"""Small Hugging Face models, sharded over ranks that do not exist: what becomes of every all-reduce, bit for bit."""

from __future__ import annotations

import collections
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tests.unit.graphs import ALL_REDUCE, FUSED, world
from tpfuse.testing import interpret_graphs

pytest.importorskip("transformers")

FUSION = "fuse_allreduce_rms"
LAYERS = 2

#: Family -> number of all-reduces by place and outcome, for two layers. A "*" stands for the layer.
EXPECTED = {
    "llama": {
        ("model.layers.*.self_attn.o_proj", "fused"): 2,
        ("model.layers.*.mlp.down_proj", "fused"): 2,
    },
    "qwen3": {
        ("model.layers.*.self_attn.o_proj", "fused"): 2,
        ("model.layers.*.mlp.down_proj", "fused"): 2,
    },
    "gemma3": {
        ("model.embed_tokens", "fused"): 1,
        ("model.layers.*.self_attn.o_proj", "fused"): 2,
        ("model.layers.*.mlp.down_proj", "fused"): 2,
    },
    "deepseek_v3": {  # attention is not sharded; the first layer is dense
        ("model.layers.*.mlp.down_proj", "fused"): 1,
        ("model.layers.*.mlp.experts | shared_experts", "fused"): 1,
        ("model.layers.*.mlp.experts | shared_experts", "merged"): 1,
    },
    "cohere": {  # LayerNorm
        ("model.embed_tokens", "skipped"): 1,
        ("model.layers.*.self_attn.o_proj", "merged"): 2,
        ("model.layers.*.mlp.down_proj", "skipped"): 2,
    },
}


def _sharded(name, dtype):
    from tpfuse.models.families import build_sharded, family_config

    return build_sharded(family_config(name, num_hidden_layers=LAYERS), init_device_mesh("cpu", (2,)), dtype)


def _logits(model, ids, config=None, **options):
    """Logits and graphs of the model with that configuration, and its report."""
    tpfuse.apply(model, config, fullgraph=True, **options)
    with interpret_graphs() as graphs:
        logits = model(ids, use_cache=False).logits
    report = tpfuse.explain(model)
    tpfuse.remove(model)
    return logits, graphs, report


def _calls(graphs, target):
    return sum(n.op == "call_function" and n.target is target for g in graphs for n in g.graph.nodes)


def _by_place(report):
    """Number of all-reduces by (place with "*" for the layer, outcome)."""
    places = collections.Counter()
    for site in report.sites:
        if site.op == "all_reduce":
            path = ".".join("*" if part.isdigit() else part for part in site.where.split("."))
            # Which of the two is the one that stays is not for a test to say.
            path = re.sub(r"mlp\.(experts|shared_experts\.down_proj)$", "mlp.experts | shared_experts", path)
            places[path, site.outcome] += 1
    return dict(places)


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in EXPECTED), ("gemma3", torch.bfloat16)],
    ids=str,
)
def test_family(name, dtype):
    model = _sharded(name, dtype)
    ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(0))
    eager = model(ids, use_cache=False).logits
    plain, plain_graphs, off = _logits(model, ids, {"optimization_level": 0})
    fused, graphs, report = _logits(model, ids)

    expected = EXPECTED[name]
    outcomes = collections.Counter()
    for (_, outcome), number in expected.items():
        outcomes[outcome] += number
    assert _by_place(report) == expected, report
    for outcome in ("fused", "merged"):
        assert report.count(FUSION, outcome) == outcomes[outcome]
    assert len(plain_graphs) == len(graphs) == 1
    assert _calls(graphs, FUSED) == outcomes["fused"]
    assert _calls(graphs, ALL_REDUCE) == outcomes["skipped"]
    assert _calls(plain_graphs, ALL_REDUCE) == outcomes.total()
    assert off.count(FUSION) == 0 and _calls(plain_graphs, FUSED) == 0

    paths = set(dict(model.named_modules()))
    assert all(site.where.partition("#")[0] in paths for site in report.sites), report
    assert all(site.reason for site in report.sites if site.outcome != "fused")
    assert {site.group for site in report.sites if site.op == "all_reduce"} == {"0"}

    if not outcomes["merged"]:  # a merge re-associates the sum
        assert torch.equal(fused, plain)
    if dtype is torch.float32:
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(fused, eager, rtol=2**-6, atol=2**-5)
    assert eager.abs().max() > 0.1


def test_gradient_hooks_and_norms_that_stay():
    """Qwen3's q and k norms have full-backward hooks: stepped around under no_grad, never deleted.

    They are named in the report, as is the first norm of all, which nothing reduced comes before.
    """
    model = _sharded("qwen3", torch.float32)
    hooks = {name: list(m._backward_hooks) for name, m in model.named_modules() if m._backward_hooks}
    assert hooks
    ids = torch.arange(3, 8)[None]
    expected = model(ids, use_cache=False).logits
    _, graphs, report = _logits(model, ids)
    assert len(graphs) == 1
    left = {s.where for s in report.sites if s.op == "rms_norm"}
    assert left == {"model.layers.0.input_layernorm"} | {
        f"model.layers.{i}.self_attn.{n}_norm" for i in range(LAYERS) for n in "qk"
    }
    assert {name: list(m._backward_hooks) for name, m in model.named_modules() if m._backward_hooks} == hooks
    assert all(m._compiled_call_impl is None for m in model.modules())
    assert torch.equal(model(ids, use_cache=False).logits, expected)
