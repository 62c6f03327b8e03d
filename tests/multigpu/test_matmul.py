"""GEMM + reduce-scatter on several GPUs, by our own kernel: against fp64, at all kinds of sizes, called back to back.

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
    """A call with its answer in fp64. Every rank makes all ranks' parts, so that no collective is needed for that."""

    def __init__(self, m: int, k: int, n: int, dtype: torch.dtype = BF16, bias: bool = False, seed: int = 0) -> None:
        rank, world, device = dist.get_rank(), dist.get_world_size(), here()
        generator = torch.Generator(device).manual_seed(seed + m + 7 * k + 11 * n)
        draw = lambda *shape: torch.randn(shape, generator=generator, device=device)  # noqa: E731
        parts = [((draw(m, k)).to(dtype), (draw(n, k) * (k * world) ** -0.5).to(dtype)) for _ in range(world)]
        self.input, weight = parts[rank]
        self.weight = weight.t()  # as torch.nn.Linear has it
        self.bias = draw(n).to(dtype) if bias else None
        share = -(-m // world)
        rows = slice(rank * share, min(m, (rank + 1) * share))
        total = sum(left[rows].double() @ right.t().double() for left, right in parts)
        if self.bias is not None:
            total = total + self.bias.double()
        self.expected = torch.zeros(share, n, dtype=torch.float64, device=device)
        self.expected[: total.shape[0]] = total

    def run(self, kernel: str = OWN, **changes) -> torch.Tensor:
        given = {"input": self.input, "weight": self.weight, "bias": self.bias, **changes}
        return ops.matmul_reduce_scatter(**given, group=dist.group.WORLD, kernel=kernel)

    def error(self, got: torch.Tensor) -> float:
        difference = (got.double() - self.expected).norm() / self.expected.norm().clamp(min=1e-30)
        return difference.nan_to_num(nan=1e9).item()


def _numbers(told: list[str]) -> None:
    for number, (m, k, n) in enumerate([*SIZES, LARGE]):
        for dtype in (BF16, FP16):
            product = Product(m, k, n, dtype, bias=number % 2 == 1)
            allowed = 2 * product.error(product.run(NCCL)) + 1e-6
            for turn in range(3):  # both halves of the workspace, and one again
                got = product.run()
                if got.dtype != dtype or got.shape != product.expected.shape or not product.error(got) <= allowed:
                    told.append(f"{(m, k, n)} {dtype} turn {turn}: {product.error(got):.2g}, allowed {allowed:.2g}")
            if not torch.equal(product.run(), product.run()):
                told.append(f"{(m, k, n)} {dtype}: other bits the second time")


def _layouts(told: list[str]) -> None:
    """Other strides than a linear layer's are copied; rows that are not there stay zero, whatever the bias."""
    product = Product(6, 64, 72, bias=True)
    for name, changes in {
        "row-major weight": {"weight": product.weight.contiguous()},
        "columns of a wider input": {"input": torch.cat((product.input, product.input), 1)[:, :64]},
        "transposed input": {"input": product.input.t().contiguous().t()},
        "unaligned": {"input": torch.cat((product.input.flatten()[:1], product.input.flatten()))[1:].view(6, 64)},
    }.items():
        if not product.error(product.run(**changes)) < 1e-2:
            told.append(name)
    odd = Product(5, 64, 72, bias=True)
    if not torch.equal(odd.run()[odd.expected.abs().sum(1) == 0], odd.run()[:0].new_zeros(5 % 2 * dist.get_rank(), 72)):
        told.append("padding is not zero")
    cube = product.input.view(2, 3, 64)
    got = ops.matmul_reduce_scatter(cube, product.weight, dim=1, group=dist.group.WORLD, kernel=OWN)
    plain = ops.matmul_reduce_scatter(cube, product.weight, dim=1, group=dist.group.WORLD, kernel=NCCL)
    if got.shape != plain.shape or not torch.allclose(got, plain, atol=0.03, rtol=0.03):
        told.append("three dimensions")


def _storm(told: list[str]) -> None:
    """Calls of random sizes without a stop between, each rank late at its own times; graphs replayed among them."""
    shared, mine = random.Random(3), random.Random(dist.get_rank())
    products = [Product(m, k, n, seed=5) for m, k, n in SIZES[:9]]
    limits = [2 * p.error(p.run(NCCL)) + 1e-6 for p in products]
    for product in products:
        product.run()
    torch.cuda.synchronize()
    graph, held = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for index in (1, 6, 3, 8, 0):
            held.append((index, products[index].run()))
    wrong = torch.zeros(len(products), dtype=torch.int64, device=here())

    def judge(index: int, got: torch.Tensor) -> None:
        expected = products[index].expected
        far = ~((got.double() - expected).norm() <= limits[index] * expected.norm())
        wrong[index] += far

    for _ in range(STORM_CALLS):
        if mine.random() < 0.2:
            delay(mine.random() * STORM_DELAY_S)
        if shared.random() < 0.2:
            graph.replay()
            for index, got in held:
                judge(index, got)
        else:
            index = shared.randrange(len(products))
            judge(index, products[index].run())
    torch.cuda.synchronize()
    told += [f"storm: {SIZES[i]} was wrong {count} times" for i, count in enumerate(wrong.tolist()) if count]


def _everything(rank: int) -> list[str]:
    told: list[str] = []
    _numbers(told)
    _layouts(told)
    _storm(told)
    torch.cuda.synchronize()
    return told


@pytest.mark.gpu
def test_matmul_reduce_scatter():
    for told in spawn(_everything, 2, backend="nccl", timeout_s=120, grace_s=30):
        assert not told, "\n".join(told)


def _as_a_program(rank: int) -> str:
    told = _everything(rank)
    assert not told, "\n".join(told)
    return "all right"


if __name__ == "__main__":
    under_torchrun(_as_a_program)
