"""How far apart two computations of one value may lie."""

from __future__ import annotations

import math

import pytest
import torch

from tpfuse.graph.rounding import eps, excess

NAN, INF = math.nan, math.inf


def _excess(found, expected, ranks=2):
    found, expected = (t if isinstance(t, torch.Tensor) else torch.tensor(t) for t in (found, expected))
    return excess(found, expected, eps(expected.dtype), ranks)[0].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_sum_rounded_at_each_step_may_differ(dtype, scale):
    """Eight ranks, bias and residual, each addition rounded, against the sum rounded once; not much more may."""
    draw = torch.Generator().manual_seed(0)
    parts = [(scale * torch.randn(64, 512, generator=draw, dtype=torch.float64)).to(dtype) for _ in range(10)]
    exact = sum(part.double() for part in parts).to(dtype)
    stepwise = parts[0]
    for part in parts[1:]:
        stepwise = stepwise + part
    assert 0.02 < _excess(stepwise, exact, ranks=8) < 1
    assert _excess(exact * (1 + 16 * torch.finfo(dtype).eps + 3e-6), exact, ranks=2) > 1


def test_one_wrong_element_of_many():
    expected = torch.randn(4, 8192, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = expected.clone()
    found[2, 77] += 1
    assert _excess(found, expected) > 1 and _excess(expected, expected) == 0


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, 2.0], [1.0, NAN], False),
        ([1.0, NAN], [1.0, 2.0], False),
        ([INF, -INF], [INF, -INF], True),
        ([INF, 1.0], [-INF, 1.0], False),
        ([INF, 1.0], [3.0, 1.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-20, 0.0], [0.0, 0.0], False),
        ([1, 2], [1, 2], True),
        ([1, 3], [1, 2], False),
        ([True, False], [True, True], False),
        (1.0, 1.0, True),
        (1.0, 1.1, False),
        ([1e30, 1e30], [1e30, 1e30], True),
        ([1e30, 2e30], [1e30, 1e30], False),
    ],
)
def test_special_values(found, expected, equal):
    assert (_excess(found, expected) <= 1) == equal


def test_shapes_and_dtypes():
    assert _excess(torch.ones(2, 3), torch.ones(3, 2)) == INF
    assert _excess(torch.ones(2, 3).half(), torch.ones(2, 3)) == INF
    assert _excess(torch.ones(0, 3), torch.ones(0, 3)) == 0
