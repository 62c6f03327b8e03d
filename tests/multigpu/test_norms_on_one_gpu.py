"""Two norms at once, and a norm with padding, by our Triton kernels on one GPU: what the operations one by one give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import tpfuse
from tests.multigpu.test_qk_norm_rope import draw
from tpfuse.models.families import build, family_config
from tpfuse.ops.dual_rms_norm import OP as DUAL
from tpfuse.ops.rms_norm import normalize
from tpfuse.ops.rms_norm_pad import OP as PAD

pytestmark = [pytest.mark.gpu]
BF16, FP16 = torch.bfloat16, torch.float16
ROWS = [0, 1, 7, 600, 4096]


def close(got, expected):
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=2 * eps, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", [(1536, 512, 64), (48, 32, 16), (768, 2880, 7)])
def test_two_norms(sizes, rows, dtype):
    a, b, _ = draw(rows, sum(sizes), dtype=dtype).split(sizes, -1)  # a stride that may be no multiple of 16 bytes
    weights = draw(sizes[0], dtype=dtype, seed=1), draw(sizes[1], dtype=dtype, seed=2)
    for given, offset, normed in ((weights, 0.0, dtype), ((None, weights[1].float()), 1.0, None)):
        found = DUAL(a, b, *given, 1e-6, 1e-5, offset, normed)
        for got, x, weight, eps in zip(found, (a, b), given, (1e-6, 1e-5), strict=True):
            close(got, normalize(x, weight, eps, offset, normed))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size, wanted", [(2880, 3072), (90, 96), (4096, 4097), (128, 1024)])
def test_norm_and_padding(size, wanted, rows, dtype):
    x, residual, weight = (
        draw(rows, size, dtype=dtype),
        draw(rows, size, dtype=dtype, seed=1),
        draw(size, dtype=dtype, seed=2),
    )
    if rows:
        x[0, 3] = torch.nan  # stays in its row, and out of what is behind it
    for added, kept in ((residual, True), (None, False)):
        padded, normed, total = PAD(x, added, weight, 1e-6, 0.0, dtype, kept, wanted)
        expected_total = x if added is None else x + added
        expected = normalize(expected_total, weight, 1e-6, 0.0, dtype)
        close(padded, functional.pad(expected, (0, wanted - size)))
        assert not kept or (torch.equal(normed.nan_to_num(9), padded[:, :size].nan_to_num(9)))
        assert added is None or torch.equal(total.nan_to_num(9), expected_total.nan_to_num(9))


def test_deepseek():
    model = build(family_config("deepseek_v3", hidden_size=512), "cuda", BF16)
    ids = torch.randint(3, 100, (2, 9), device="cuda")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        tpfuse.apply(model)
        got = model(ids, use_cache=False).logits
    assert (got - expected).float().norm() < 0.05 * expected.float().norm()
    assert tpfuse.explain(model).count("fuse_mla_dual_rms_norm") == 2, str(tpfuse.explain(model))
