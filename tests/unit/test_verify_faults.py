"""``verify`` finds a fault put into any operation of one process, and into the one that ends an all-reduce in FP8.

What a fault does over ranks, and faults of passes, are in tests/gloo/test_verify.py.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from tests.unit import test_norms_on_one_gpu as norms
from tests.unit import test_qk_norm_rope as heads
from tests.unit import test_quantize_fp8 as fp8
from tests.unit import test_rope_kvcache as caches
from tests.unit.graphs import Backend, all_reduce, replaced, world
from tpfuse.errors import VerificationError


def _quantised(x, r, w):
    return fp8.torchao_row(fp8.norm(x + r, w))


def _activated(gate, up):
    return fp8.torchao_row(functional.silu(gate) * up)


def _reduced(x, r, w):
    return fp8.torchao_row(fp8.norm(r + all_reduce(x), w))


def _padded(x, r, w):
    return norms.padded(norms.norm(x + r, w))


def _rotated(packed, wq, wk, cos, sin):
    q, k, v = (x.view(heads.B, heads.T, -1, heads.D).transpose(1, 2) for x in packed.split(_PARTS, -1))
    return *(heads.hugging_face(heads.norm(x, w), cos, sin) for x, w in ((q, wq), (k, wk))), v


_PARTS = (heads.H * heads.D, heads.K * heads.D, heads.K * heads.D)
_HEADS = (heads.PACKED, heads.WQ, heads.WK, heads.COS, heads.SIN)
_POSITIONS = torch.arange(4, 4 + heads.T)
#: Operation -> the configuration that makes it, a model that it is found in, and inputs.
CASES = {
    "rms_norm_quantize_fp8": ("fuse_norm_quant", _quantised, lambda: (fp8.X, fp8.R, fp8.W)),
    "act_mul_quantize_fp8": ("fuse_act_quant", _activated, lambda: (fp8.X, fp8.R)),
    "all_reduce_rms_norm_quantize_fp8": ("fuse_allreduce_rms", _reduced, lambda: (fp8.X, fp8.R, fp8.W)),
    "qk_norm_rope": ("enable_qk_norm_rope_fusion", _rotated, lambda: _HEADS),
    "rope_kvcache": ("fuse_rope_kvcache", caches.layer, lambda: (*_HEADS, *caches.caches(), _POSITIONS)),
    "dual_rms_norm": (
        "fuse_mla_dual_rms_norm",
        norms.slices,
        lambda: (norms.HIDDEN, norms.PROJECTION, norms.WA, norms.WB),
    ),
    "rms_norm_pad": ("fuse_act_padding", _padded, lambda: (norms.X, norms.R, norms.W)),
}


@contextlib.contextmanager
def _fault(op: str, calls: list[str]) -> Iterator[None]:
    """The first call of an operation gives one element that is wrong by less than half of the largest."""
    run = importlib.import_module(f"tpfuse.ops.{op}")._run

    def faulty(*args, **kwargs):
        calls.append(op)
        results = run(*args, **kwargs)
        if len(calls) == 1:
            first = results[0] if isinstance(results, tuple) else results
            wrong = first.float()
            wrong[(0,) * wrong.dim()] += 0.4 * wrong.abs().max()
            first.copy_(wrong.to(first.dtype))
        return results

    with replaced("tpfuse", **{op: faulty}):
        yield


@pytest.mark.parametrize("op", CASES)
def test_a_fault_is_found(op):
    fusion, model, inputs = CASES[op]
    calls: list[str] = []
    with world(2), _fault(op, calls):
        compiled = torch.compile(model, backend=Backend({fusion: True}, verify=1), fullgraph=True)
        with pytest.raises(VerificationError, match="times as much as rounding may"):
            compiled(*inputs())
        compiled(*inputs())  # and nothing is found where nothing is wrong
    assert len(calls) > 2
