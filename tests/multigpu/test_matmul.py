"""GEMMs with collectives on several GPUs, by our own kernels: against fp64, at all kinds of sizes, called back to back.

By itself: torchrun --nproc-per-node 2 -m tests.multigpu.test_matmul

M  rows     K  inner dimension of each rank     N  columns     S  rows of one rank
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.multigpu.checks import BF16, FP16, delay, here
from tpfuse import ops
from tpfuse.testing import spawn, under_torchrun

OWN, NCCL = "tpfuse", "nccl"
SIZES = [
    (1, 64, 8), (2, 64, 64), (3, 72, 136), (127, 128, 256), (256, 512, 512), (257, 200, 264), (512, 4096, 1024),
    (1000, 1048, 776), (2048, 2048, 2048), (4096, 1024, 4096), (2047, 520, 8192),
]  # fmt: skip
LARGE = (16384, 256, 8192)  # does not fit into the workspace at once
STORM_CALLS, STORM_DELAY_S = 400, 2e-3


class Product:
    """A call with its answers in fp64. Every rank makes all ranks' parts, so that no collective is needed for that."""

    name = ""

    def __init__(self, m: int, k: int, n: int, dtype: torch.dtype = BF16, bias: bool = False, seed: int = 0) -> None:
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), here()
        self.sizes, self.dtype, self.share = (m, k, n), dtype, -(-m // self.world)
        self.generator = torch.Generator(self.device).manual_seed(seed + m + 7 * k + 11 * n)
        self.bias = self.draw(n) if bias else None
        self.expected: list[torch.Tensor] = []
        self.make(m, k, n)

    def draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(self.dtype)

    def make(self, m: int, k: int, n: int) -> None:
        raise NotImplementedError

    def run(self, kernel: str = OWN, **changes) -> list[torch.Tensor]:
        raise NotImplementedError

    def errors(self, got: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(got, self.expected, strict=True)
        errors = [(g.double() - e).norm() / e.norm().clamp(min=1e-30) for g, e in pairs]
        return torch.stack(errors).nan_to_num(nan=1e9)

    def error(self, got: list[torch.Tensor]) -> float:
        return self.errors(got).max().item()

    def fits(self, got: list[torch.Tensor]) -> bool:
        return [(g.shape, g.dtype) for g in got] == [(e.shape, self.dtype) for e in self.expected]

    def __str__(self) -> str:
        return f"{self.name} {self.sizes} {self.dtype}"


class Scatter(Product):
    name = "reduce-scatter"

    def make(self, m: int, k: int, n: int) -> None:
        parts = [(self.draw(m, k), self.draw(n, k, scale=(k * self.world) ** -0.5)) for _ in range(self.world)]
        self.input, weight = parts[self.rank]
        self.weight = weight.t()  # as torch.nn.Linear has it
        rows = slice(self.rank * self.share, min(m, (self.rank + 1) * self.share))
        total = sum(left[rows].double() @ right.t().double() for left, right in parts)
        if self.bias is not None:
            total = total + self.bias.double()
        whole = torch.zeros(self.share, n, dtype=torch.float64, device=self.device)
        whole[: total.shape[0]] = total
        self.expected = [whole]

    def run(self, kernel: str = OWN, **changes) -> list[torch.Tensor]:
        given = {"input": self.input, "weight": self.weight, "bias": self.bias, **changes}
        return [ops.matmul_reduce_scatter(**given, group=dist.group.WORLD, kernel=kernel)]


class Gather(Product):
    """Two weights, the second narrow, and the gathered rows."""

    name = "all-gather"

    def make(self, m: int, k: int, n: int) -> None:
        whole = self.draw(m, k)
        self.input = whole.new_zeros(self.share, k)
        rows = whole[self.rank * self.share : (self.rank + 1) * self.share]
        self.input[: rows.shape[0]] = rows
        self.weights = [self.draw(columns, k, scale=k**-0.5).t() for columns in (n, 24)]
        self.expected = [whole.double() @ weight.double() for weight in self.weights]
        if self.bias is not None:
            self.expected[0] += self.bias.double()
        self.expected.append(whole.double())

    def run(self, kernel: str = OWN, **changes) -> list[torch.Tensor]:
        given = {"input": self.input, "weights": self.weights, "biases": [self.bias, None], **changes}
        common = {"group": dist.group.WORLD, "size": self.sizes[0], "gathered": True, "kernel": kernel}
        return list(ops.all_gather_matmul(**given, **common))


def _numbers(told: list[str]) -> None:
    for number, (m, k, n) in enumerate([*SIZES, LARGE]):
        for kind in (Scatter, Gather):
            for dtype in (BF16, FP16):
                product = kind(m, k, n, dtype, bias=number % 2 == 1)
                allowed = 2 * product.error(product.run(NCCL)) + 1e-6
                for turn in range(3):  # both halves of the workspace, and one again
                    got = product.run()
                    if not product.fits(got) or not product.error(got) <= allowed:
                        told.append(f"{product} turn {turn}: {product.errors(got).tolist()}, allowed {allowed:.2g}")
                if not all(map(torch.equal, product.run(), product.run())):
                    told.append(f"{product}: other bits the second time")


def _layouts(told: list[str]) -> None:
    """Other strides than a linear layer's are copied; rows that are not there stay zero, whatever the bias."""
    product, gather = Scatter(6, 64, 72, bias=True), Gather(6, 64, 72, bias=True)
    for call in (product, gather):
        x, k = call.input, call.input.shape[1]
        for name, changes in {
            "columns of a wider input": {"input": torch.cat((x, x), 1)[:, :k]},
            "transposed input": {"input": x.t().contiguous().t()},
            "unaligned": {"input": torch.cat((x.flatten()[:1], x.flatten()))[1:].view(-1, k)},
        }.items():
            if not call.error(call.run(**changes)) < 1e-2:
                told.append(f"{call}: {name}")
    for m, k, n in ((6, 64, 72), (300, 520, 776), (512, 2048, 1024)):
        by_columns, gathering = Scatter(m, k, n, bias=True), Gather(m, k, n)
        if not by_columns.error(by_columns.run(weight=by_columns.weight.contiguous())) < 1e-2:
            told.append(f"{by_columns}: row-major weight")
        by_rows = [weight.contiguous() for weight in gathering.weights]
        for weights in (by_rows, [by_rows[0], gathering.weights[1]]):
            if not gathering.error(gathering.run(weights=weights)) < 1e-2:
                told.append(f"{gathering}: row-major weights")
    odd = Scatter(5, 64, 72, bias=True)
    (got,) = odd.run()
    if got[5 - odd.rank * odd.share :].any():
        told.append("padding is not zero")
    cube = product.input.view(2, 3, 64)
    by = [
        ops.matmul_reduce_scatter(cube, product.weight, dim=1, group=dist.group.WORLD, kernel=kernel)
        for kernel in (OWN, NCCL)
    ]
    if by[0].shape != by[1].shape or not torch.allclose(*by, atol=0.03, rtol=0.03):
        told.append("three dimensions")


def _storm(told: list[str]) -> None:
    """Calls of random sizes without a stop between, each rank late at its own times; graphs replayed among them."""
    shared, mine = random.Random(3), random.Random(dist.get_rank())
    products = [kind(m, k, n, seed=5) for m, k, n in SIZES[:9] for kind in (Scatter, Gather)]
    limits = [2 * p.error(p.run(NCCL)) + 1e-6 for p in products]
    for product in products:
        product.run()
    torch.cuda.synchronize()
    graph, held = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for index in (1, 6, 3, 16, 0, 17, 13):
            held.append((index, products[index].run()))
    wrong = torch.zeros(len(products), dtype=torch.int64, device=here())
    for _ in range(STORM_CALLS):
        if mine.random() < 0.2:
            delay(mine.random() * STORM_DELAY_S)
        if shared.random() < 0.2:
            graph.replay()
            results = held
        else:
            index = shared.randrange(len(products))
            results = [(index, products[index].run())]
        for index, got in results:
            wrong[index] += ~(products[index].errors(got) <= limits[index]).all()
    torch.cuda.synchronize()
    told += [f"storm: {products[i]} was wrong {count} times" for i, count in enumerate(wrong.tolist()) if count]


def _everything(rank: int) -> list[str]:
    told: list[str] = []
    _numbers(told)
    _layouts(told)
    _storm(told)
    torch.cuda.synchronize()
    return told


@pytest.mark.gpu
def test_gemms_with_collectives():
    for told in spawn(_everything, 2, backend="nccl", timeout_s=120, grace_s=30):
        assert not told, "\n".join(told)


def _as_a_program(rank: int) -> str:
    told = _everything(rank)
    assert not told, "\n".join(told)
    return "all right"


if __name__ == "__main__":
    under_torchrun(_as_a_program)
