"""The model by which ``tpfuse tune --sequence-parallel`` finds from how many rows on sharding them is faster.

Blocks with the GEMMs, norms and all-reduces of a Llama's. Attention itself is left out: it runs on each rank's own heads
and all rows, alike in both variants, so it does not change which of them is the faster. What is as wide is in its place.

T  rows     D  hidden size     F  intermediate size     R  ranks
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

EPS = 1e-5


class Block(nn.Module):
    """The weights of one rank: column-parallel GEMMs to D / R or F / R columns, row-parallel ones from as many."""

    def __init__(self, hidden: int, intermediate: int, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__()
        heads, columns = hidden // group.size(), intermediate // group.size()
        self.q, self.k, self.v = (nn.Linear(hidden, heads, bias=False, dtype=dtype) for _ in range(3))
        self.output = nn.Linear(heads, hidden, bias=False, dtype=dtype)
        self.gate, self.up = (nn.Linear(hidden, columns, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(columns, hidden, bias=False, dtype=dtype)
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(hidden, EPS, dtype=dtype) for _ in range(2))
        self.tp_group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.attention_norm(x)
        heads = torch.sigmoid(self.q(rows)) * self.k(rows) + self.v(rows)
        x = x + self._summed(self.output(heads))
        rows = self.mlp_norm(x)
        return x + self._summed(self.down(nn.functional.silu(self.gate(rows)) * self.up(rows)))

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        functional = torch.ops._c10d_functional  # the functions around these have other names in each version of torch
        return functional.wait_tensor(functional.all_reduce(partial, "sum", self.tp_group.group_name))


class Stack(nn.Module):
    """[T, D] replicated -> [T, F / R], this rank's columns of a last GEMM, as a model's head has them.

    like  a stack whose weights this one has, too
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        layers: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        like: nn.Module | None = None,
    ) -> None:
        super().__init__()
        with torch.device(device if like is None else "meta"):
            self.layers = nn.ModuleList(Block(hidden, intermediate, group, dtype) for _ in range(layers))
            self.norm = nn.RMSNorm(hidden, EPS, dtype=dtype)
            self.head = nn.Linear(hidden, intermediate // group.size(), bias=False, dtype=dtype)
        if like is None:
            self._draw(group.rank(), device)
        else:
            self.load_state_dict(like.state_dict(), assign=True)

    @torch.no_grad()
    def _draw(self, rank: int, device: torch.device) -> None:
        """Random weights, other ones on each rank; the norms' are 1."""
        random = torch.Generator(device).manual_seed(rank)
        for weight in (parameter for parameter in self.parameters() if parameter.dim() == 2):
            weight.normal_(0.0, weight.shape[1] ** -0.5 / 2, generator=random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
