"""Gradients of the fused operations, called eagerly on CPU ranks, against autograd of the unsharded computation.

M  rows     D  hidden size     H  intermediate size
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tpfuse import ops
from tpfuse.testing import spawn

pytestmark = pytest.mark.slow

D, H = 12, 24
LIMIT = 1e-5


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) / shape[-1] ** 0.5


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().contiguous().requires_grad_()


def _far(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Relative; a gradient that is missing is infinitely far."""
    if found is None or expected is None or found.shape != expected.shape:
        return float("inf")
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def _mlp(rank: int, rows: int) -> dict[str, float]:
    """Sequence-parallel: rows gathered for two GEMMs with biases, a router that reads them, scattered after the last."""
    world, share = dist.get_world_size(), -(-rows // dist.get_world_size())
    x, up, gate, down = _draw(rows, D, seed=1), _draw(D, H, seed=2), _draw(D, H, seed=3), _draw(H, D, seed=4)
    bias, router, added, toward = _draw(H, seed=5), _draw(D, 3, seed=6), _draw(D, seed=7), _draw(rows, D, seed=8)

    whole = {
        name: _leaf(t) for name, t in {"x": x, "up": up, "gate": gate, "down": down, "bias": bias, "added": added}.items()
    }
    y = torch.relu(whole["x"] @ whole["up"] + whole["bias"]) * (whole["x"] @ whole["gate"])
    weight = (whole["x"] @ router).softmax(-1)[:, :1]
    ((y @ whole["down"] + whole["added"]) * toward).sum().backward()
    (weight.sum() * world).backward()  # every rank's router counts

    mine = slice(rank * share, (rank + 1) * share)
    columns = lambda t: t.chunk(world, -1)[rank]  # noqa: E731
    padded = torch.cat([x, x.new_zeros(world * share - rows, D)])
    leaves = {"x": padded[mine], "up": columns(up), "gate": columns(gate), "down": down.chunk(world)[rank]}
    leaves |= {"bias": columns(bias), "added": added}
    mine_of = {name: _leaf(t) for name, t in leaves.items()}
    group = dist.group.WORLD
    a, b, gathered = ops.all_gather_matmul(
        mine_of["x"],
        [mine_of["up"], mine_of["gate"]],
        group=group,
        size=rows,
        biases=[mine_of["bias"], None],
        gathered=True,
    )
    out = ops.matmul_reduce_scatter(torch.relu(a) * b, mine_of["down"], group=group, bias=mine_of["added"])
    here = torch.cat([toward, toward.new_zeros(world * share - rows, D)])[mine]
    ((out * here).sum() + (gathered @ router).softmax(-1)[:, :1].sum()).backward()

    expected = {"up": columns(whole["up"].grad), "gate": columns(whole["gate"].grad), "bias": columns(whole["bias"].grad)}
    expected |= {"down": whole["down"].grad.chunk(world)[rank], "added": whole["added"].grad}
    expected["x"] = torch.cat([whole["x"].grad, x.new_zeros(world * share - rows, D)])[mine]
    return {name: _far(mine_of[name].grad, expected[name]) for name in expected}


def test_a_sequence_parallel_mlp():
    for found in spawn(_mlp, 3, 7, timeout_s=120):
        assert max(found.values()) < LIMIT, found


def _one_weight(rank: int) -> dict[str, float]:
    """Of a batch, along dimension 1; the backward is the other operation."""
    world, group = dist.get_world_size(), dist.group.WORLD
    x, w, toward = _draw(3, 4, D, seed=1), _draw(D, H, seed=2), _draw(3, 4, H, seed=3)
    whole_x, whole_w = _leaf(x), _leaf(w)
    ((whole_x @ whole_w) * toward).sum().backward()
    local, part = _leaf(x.chunk(world, 1)[rank]), _leaf(w.chunk(world, 1)[rank])
    (found,) = ops.all_gather_matmul(local, part, group=group, dim=1)
    (found * toward.chunk(world, -1)[rank]).sum().backward()
    return {
        "x": _far(local.grad, whole_x.grad.chunk(world, 1)[rank]),
        "w": _far(part.grad, whole_w.grad.chunk(world, 1)[rank]),
    }


def _two_ranks(rank: int) -> list[dict[str, float]]:
    return [_one_weight(rank), _row_parallel(rank, 0.0), _row_parallel(rank, 1.0)]


def test_one_weight_and_row_parallel():
    for each in spawn(_two_ranks, 2, timeout_s=120):
        for found in each:
            assert max(found.values()) < LIMIT, found


def _row_parallel(rank: int, offset: float) -> dict[str, float]:
    """Megatron's: GEMM + all-reduce, then all-reduce + bias + scale + residual + norm; gradients are replicated."""
    world, group, eps, scale = dist.get_world_size(), dist.group.WORLD, 1e-5, 0.5
    x, w, v = _draw(5, H, seed=1), _draw(H, D, seed=2), _draw(H, D, seed=3)
    bias, norm, toward = _draw(D, seed=4), _draw(D, seed=5) + 1, _draw(5, D, seed=6)
    whole = [_leaf(t) for t in (x, w, v, bias, norm)]
    first = whole[0] @ whole[1] + whole[3]
    total = (whole[0] @ whole[2] + whole[3]) * scale + first
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * (whole[4] + offset)
    alone = whole[0] @ whole[2]
    alone = alone * torch.rsqrt(alone.pow(2).mean(-1, keepdim=True) + eps)
    ((normed + 0.1 * total + 0.2 * (whole[0] @ whole[1]) + 0.3 * alone) * toward).sum().backward()
    part = lambda t, dim: t.chunk(world, dim)[rank]  # noqa: E731
    mine = [_leaf(t) for t in (part(x, 1), part(w, 0), part(v, 0), bias, norm)]
    first = ops.matmul_all_reduce(mine[0], mine[1], group=group, bias=mine[3])
    arguments = {"group": group, "eps": eps, "residual": first, "bias": mine[3], "scale": scale, "weight_offset": offset}
    normed, total = ops.all_reduce_rms_norm(mine[0] @ mine[2], mine[4], **arguments)
    again = ops.all_reduce(mine[0] @ mine[1], group=group)
    alone, _ = ops.all_reduce_rms_norm(mine[0] @ mine[2], None, group=group, eps=eps)  # without a residual, or a weight
    ((normed + 0.1 * total + 0.2 * again + 0.3 * alone) * toward).sum().backward()
    expected = [part(whole[0].grad, 1), part(whole[1].grad, 0), part(whole[2].grad, 0), whole[3].grad, whole[4].grad]
    return {name: _far(mine[n].grad, expected[n]) for n, name in enumerate(("x", "w", "v", "bias", "norm"))}
