"""A tensor-parallel model of modules, as users change, copy and store them; what they replace its layers by."""

from __future__ import annotations

import types

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY, HIDDEN, INNER = 32, 48, 64


class RowParallel(nn.Linear):
    """Sums over the ranks of the world, whose group is not kept: such a model pickles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight)
        dist.all_reduce(y)
        return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        part = INNER // dist.get_world_size()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.up, self.down = nn.Linear(HIDDEN, part, bias=False), RowParallel(part, HIDDEN, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(nn.functional.silu(self.up(self.norm(h))))


class Model(nn.Module):
    """Two layers, each with one all-reduce that reaches a norm. Shards differ between ranks."""

    def __init__(self, with_group: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = types.SimpleNamespace(vocab_size=VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        fill(self, 1)
        if with_group:
            self.tp_group = dist.group.WORLD

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


def fill(model: nn.Module, seed: int) -> None:
    """Give every layer's shards other values, those of this rank."""
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    with torch.no_grad():
        for layer in model.layers:
            for linear in (layer.up, layer.down):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) / 6)


def ids(count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(count))


class Lora(nn.Module):
    """base(x) + (the ranks' sum of x @ A) @ B. A is sharded as the rows of the base's weight are, B is replicated."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        mine, same = (torch.Generator().manual_seed(seed) for seed in (50 + dist.get_rank(), 7))
        self.a = nn.Parameter(torch.randn(rank, base.in_features, generator=mine) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, rank, generator=same) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(x, self.a)
        dist.all_reduce(inner)
        return self.base(x) + nn.functional.linear(inner, self.b)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


class Int8RowParallel(nn.Module):
    """A row-parallel linear whose weight is kept in eight bits: a quantizer that replaces modules."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        data, scale = quantized(base.weight)
        self.register_buffer("data", data)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.data.to(x.dtype) * self.scale)
        dist.all_reduce(y)
        return y


class Int8Weight(torch.Tensor):
    """A weight in eight bits: a quantizer that replaces parameters, and keeps the modules."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Int8Weight:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Int8Weight(inner["integers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Int8Weight(function(args[0].integers), function(args[0].scale))
        widen = lambda t: t.integers.to(t.scale.dtype) * t.scale if isinstance(t, Int8Weight) else t  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(widen, (args, kwargs or {}))
        return function(*args, **kwargs)
