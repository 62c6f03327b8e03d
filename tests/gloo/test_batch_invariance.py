"""``batch_invariant``: a token has the same bits alone and in any batch, through our operations and a stack of layers.

T  tokens     D  hidden size     H  inner size of a rank
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import tpfuse
from tpfuse import ops
from tpfuse.config import FusionConfig
from tpfuse.errors import ConfigError
from tpfuse.graph import pipeline
from tpfuse.kernels.candidates import BATCH_INVARIANT
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow

D, H, EPS = 100, 24, 1e-5
SIZES = (2, 3, 8, 63, 256)
MODE = {"batch_invariant": True, "token_boundaries": (4, 64)}


@torch.library.custom_op("tpfuse_tests::matmul_by_row", mutates_args=())
def matmul_by_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product that is the same for a row in any batch, which BLAS does not promise."""
    return torch.cat([row @ w for row in x.split(1)])


@matmul_by_row.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1])


class Stack(nn.Module):
    """Blocks with a norm behind each all-reduce, and one all-reduce without."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        draw = lambda *shape: nn.Parameter(torch.randn(*shape) / shape[0] ** 0.5, requires_grad=False)  # noqa: E731
        torch.manual_seed(rank + 1)  # shards of weights differ, norms do not
        self.up, self.down = (nn.ParameterList([draw(*shape) for _ in range(3)]) for shape in ((D, H), (H, D)))
        torch.manual_seed(0)
        self.norms = nn.ParameterList([1 + draw(D) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            part = matmul_by_row(torch.relu(matmul_by_row(n, up)), down)
            x = x + funcol.all_reduce(part, "sum", dist.group.WORLD)
            n = nn.functional.rms_norm(x, (D,), norm, EPS)
        return funcol.all_reduce(torch.relu(matmul_by_row(n, self.up[0])), "sum", dist.group.WORLD)


def _draw(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _differing(run, token: torch.Tensor, others: torch.Tensor) -> list[str]:
    """Sizes and places at which the token's result is not that of the token alone."""
    alone, found = run(token), []
    for size in SIZES:
        for place in (0, size - 1):
            batch = torch.cat([others[:place], token, others[place : size - 1]])
            if not torch.equal(run(batch)[place : place + 1], alone):
                found.append(f"{size} rows, row {place}")
    return found


def _everywhere(rank: int) -> dict[str, list[str]]:
    group, found = dist.group.WORLD, {}
    for dtype in (torch.float32, torch.bfloat16):
        token, others = _draw(1, rank, dtype), _draw(max(SIZES), 10 + rank, dtype)
        weight = 1 + _draw(1, 99, dtype)[0]
        both = lambda x, weight=weight: ops.all_reduce_rms_norm(  # noqa: E731
            x, weight, group=group, eps=EPS, residual=x * 0 + 1, kernel=BATCH_INVARIANT
        )
        for number, name in enumerate(("norm", "sum")):
            found[f"{name} {dtype}"] = _differing(lambda x, n=number: both(x)[n], token, others)  # noqa: B023
        plain = lambda x: ops.all_reduce(x, group=group, kernel=BATCH_INVARIANT)  # noqa: E731
        found[f"all_reduce {dtype}"] = _differing(plain, token, others)
    with torch.no_grad(), interpret_graphs() as graphs:
        model = tpfuse.apply(Stack(rank), MODE, fullgraph=True)
        found["stack"] = _differing(model, _draw(1, 5), _draw(max(SIZES), 6))
        left = [str(n.target) for g in graphs for n in g.graph.nodes if "_c10d_functional" in str(n.target)]
        found["left to others"] = left
        fused = {site.kernel for site in tpfuse.explain(model).sites if site.op == "all_reduce"}
        found["kernels"] = sorted(fused - {"reference"})
    return found


def test_any_batch():
    """Three ranks: with two, every order of adding is the same. All collectives are ours, in every variant."""
    for found in spawn(_everywhere, 3, timeout_s=120):
        assert not any(found.values()), found


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"enable_sp": True}, "enable_sp=True cannot be honoured: batch_invariant"),
        ({"fuse_gemm_comms": True}, "fuse_gemm_comms=True cannot be honoured: batch_invariant"),
        ({"sp_min_token_num": 4}, "sp_min_token_num=4 cannot be honoured: batch_invariant"),
        ({"fuse_allreduce_rms": False}, "batch_invariant=True cannot be honoured without fuse_allreduce_rms"),
        ({"optimization_level": 0}, "batch_invariant=True cannot be honoured without fuse_allreduce_rms"),
        ({"allreduce_rms_kernel": "nccl"}, "cannot be honoured by allreduce_rms_kernel 'nccl'"),
        ({"batch_invariant": 2}, "batch_invariant must be True or False"),
    ],
)
def test_what_cannot_be_had_with_it(config, why):
    with pytest.raises(ConfigError, match=why):
        tpfuse.apply(nn.Linear(2, 2), {"batch_invariant": True} | config)


def test_configuration():
    """From strings; what it turns off is told with the reason."""
    config = FusionConfig.from_strings(["batch_invariant=on"])
    assert config.batch_invariant and FusionConfig.from_dict(config.to_dict()) == config
    resolved = pipeline.resolve(config)
    assert resolved["fuse_allreduce_rms"].on and not resolved["enable_sp"].on
    assert "batch_invariant" in resolved["enable_sp"].reason and "batch_invariant" in resolved["fuse_gemm_comms"].reason
