"""Hand-written tensor-parallel layers, and the unsharded computation they must equal.

K  sharded inner size     H  hidden size     T  tokens
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn


class Block(nn.Module):
    """Row-parallel linear -> all-reduce -> add residual -> RMSNorm -> column-parallel linear with SiLU.

    style  how the all-reduce is written: "inplace", "functional", or "view" (in place on a flat view)
    """

    def __init__(self, inner: int, hidden: int, group: dist.ProcessGroup, style: str, eps: float, dtype: torch.dtype):
        super().__init__()
        ranks, rank = group.size(), group.rank()
        down, up = torch.randn(inner, hidden, dtype=dtype), torch.randn(hidden, inner, dtype=dtype) / hidden**0.5
        self.register_buffer("full_down", down / inner**0.5, persistent=False)
        self.register_buffer("full_up", up, persistent=False)
        self.down = nn.Parameter(self.full_down.tensor_split(ranks, 0)[rank].clone())
        self.up = nn.Parameter(self.full_up.tensor_split(ranks, 1)[rank].clone())
        self.norm = nn.RMSNorm(hidden, eps=eps, dtype=dtype)
        nn.init.normal_(self.norm.weight, 1.0, 0.1)
        self.tp_group, self.style = group, style

    def all_reduce(self, y: torch.Tensor) -> torch.Tensor:
        if self.style == "functional":
            return funcol.all_reduce(y, "sum", self.tp_group)
        dist.all_reduce(y.view(-1) if self.style == "view" else y, group=self.tp_group)
        return y

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + self.all_reduce(x @ self.down)
        return nn.functional.silu(self.norm(residual) @ self.up), residual

    def unsharded(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x @ self.full_down
        return nn.functional.silu(self.norm(residual) @ self.full_up), residual


class Stack(nn.Module):
    """Blocks one after another; returns the last norm's output, the residual, and the residual after the first block."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        layers: int = 3,
        inner: int = 64,
        hidden: int = 96,
        style: str = "inplace",
        eps: float = 1e-5,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        break_after: int | None = None,
    ):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block(inner, hidden, group, style, eps, dtype) for _ in range(layers))
        self.inner, self.hidden, self.dtype, self.break_after = inner, hidden, dtype, break_after
        self.tp_group = group

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first = residual
        for index, layer in enumerate(self.layers):
            if index == self.break_after:
                torch._dynamo.graph_break()
            x, residual = layer(x, residual)
            if index == 0:
                first = residual
        return layer.norm(residual), residual, first

    def inputs(self, *shape: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """(this rank's part of x, residual) for that many tokens."""
        x, residual = self._full_inputs(shape, seed)
        return x.tensor_split(self.tp_group.size(), -1)[self.tp_group.rank()].contiguous(), residual

    def unsharded(self, *shape: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``forward`` must return for those inputs."""
        x, residual = self._full_inputs(shape, seed)
        first = residual
        for index, layer in enumerate(self.layers):
            x, residual = layer.unsharded(x, residual)
            if index == 0:
                first = residual
        return layer.norm(residual), residual, first

    def _full_inputs(self, shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, self.inner, generator=generator, dtype=torch.float32)
        residual = torch.randn(*shape, self.hidden, generator=generator, dtype=torch.float32)
        return x.to(self.dtype), residual.to(self.dtype)


def largest_difference(model: Stack, *shape: int, seed: int = 1) -> float:
    """Of an (applied) stack from the unsharded computation, over all three outputs."""
    with torch.no_grad():
        got, expected = model(*model.inputs(*shape, seed=seed)), model.unsharded(*shape, seed=seed)
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape and g.dtype == e.dtype, (g.shape, e.shape, g.dtype)
    return max((g.float() - e.float()).abs().max().item() if g.numel() else 0.0 for g, e in zip(got, expected, strict=True))


def same_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the ranks of the group hold the same bits."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return all(torch.equal(part, parts[0]) for part in parts)
