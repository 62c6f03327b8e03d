"""GEMMs with collectives on several GPUs, by our own kernels: against fp64, at all kinds of sizes, called back to back.

By itself: torchrun --nproc-per-node 2 -m tests.multigpu.test_matmul

M  rows     K  inner dimension of each rank     N  columns     S  rows of one rank
"""

from __future__ import annotations

import contextlib
import itertools
import random
import unittest.mock

import pytest
import torch
import torch.distributed as dist

from tests.multigpu.checks import BF16, FEWER, FP16, delay, here
from tpfuse import ops
from tpfuse.kernels.cuda import all_gather_matmul as gather
from tpfuse.kernels.cuda import matmul_reduce_scatter as scatter
from tpfuse.kernels.cuda.gemm import FP8, Tiling
from tpfuse.testing import spawn, under_torchrun

OWN, NCCL = "tpfuse", "nccl"
SIZES = [
    (1, 64, 8), (2, 64, 64), (3, 72, 136), (127, 128, 256), (256, 512, 512), (257, 200, 264), (512, 4096, 1024),
    (1000, 1048, 776), (2048, 2048, 2048), (4096, 1024, 4096), (2047, 520, 8192),
]  # fmt: skip
LARGE = (16384, 256, 8192)  # does not fit into the workspace at once
STORM_SIZES = SIZES[:6]
STORM_CALLS, SLOW_CALLS, STORM_DELAY_S = 5000 // FEWER, 500 // FEWER, 1e-3


class Product:
    """A call with its answers in fp64. Every rank makes all ranks' parts, so that no collective is needed for that.

    scales  "" or, for FP8 operands, "tensor" or "row"
    """

    name = ""

    def __init__(
        self, m: int, k: int, n: int, dtype: torch.dtype = BF16, bias: bool = False, seed: int = 0, scales: str = ""
    ) -> None:
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), here()
        self.sizes, self.dtype, self.share, self.scales = (m, k, n), dtype, -(-m // self.world), scales
        self.generator = torch.Generator(self.device).manual_seed(seed + m + 7 * k + 11 * n)
        self.bias = self.random(n).to(dtype) if bias else None
        self.expected: list[torch.Tensor] = []
        self.make(m, k, n)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def draw(self, rows: int, k: int, deviation: float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An operand, and its scale: one number, or one for each row."""
        if not self.scales:
            return (self.random(rows, k) * deviation).to(self.dtype), None
        scale = self.random(rows, 1).abs() + 0.5 if self.scales == "row" else torch.full((), 0.75, device=self.device)
        return self.random(rows, k).to(FP8), scale * deviation

    def options(self, input_scale: torch.Tensor | None, **weight_scales) -> dict:
        if not self.scales:
            return {}
        return {"input_scale": input_scale, "out_dtype": self.dtype, **weight_scales}

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

    def allowed(self) -> float:
        """Twice as far from fp64 as cuBLAS and the group's backend are."""
        return 2 * self.error(self.run(NCCL)) + 1e-6

    def fits(self, got: list[torch.Tensor]) -> bool:
        of_operands = FP8 if self.scales else self.dtype
        dtypes = [self.dtype] * (len(got) - 1) + [of_operands if len(got) > 1 else self.dtype]
        return [(g.shape, g.dtype) for g in got] == [(e.shape, d) for e, d in zip(self.expected, dtypes, strict=True)]

    def __str__(self) -> str:
        return f"{self.name} {self.sizes} {self.dtype} {self.scales}"


def _exact(operand: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    values, scale = operand
    return values.double() if scale is None else values.double() * scale.double()


class Scatter(Product):
    name = "reduce-scatter"

    def make(self, m: int, k: int, n: int) -> None:
        deviation = (k * self.world) ** -0.5
        parts = [(self.draw(m, k), self.draw(n, k, deviation)) for _ in range(self.world)]
        (self.input, input_scale), (weight, weight_scale) = parts[self.rank]
        self.weight = weight.t()  # as torch.nn.Linear has it
        self.more = self.options(input_scale, weight_scale=weight_scale.t() if self.scales else None)
        total = sum(_exact(left) @ _exact(right).t() for left, right in parts)
        self.expect(total if self.bias is None else total + self.bias.double())

    def expect(self, total: torch.Tensor) -> None:
        whole = total.new_zeros(self.share * self.world, total.shape[1])
        whole[: total.shape[0]] = total
        self.expected = [whole[self.rank * self.share :][: self.share].clone()]

    def run(self, kernel: str = OWN, **changes) -> list[torch.Tensor]:
        given = {"input": self.input, "weight": self.weight, "bias": self.bias, **self.more, **changes}
        return [ops.matmul_reduce_scatter(**given, group=dist.group.WORLD, kernel=kernel)]


class Reduce(Scatter):
    name = "all-reduce"

    def expect(self, total: torch.Tensor) -> None:
        self.expected = [total]

    def run(self, kernel: str = OWN, **changes) -> list[torch.Tensor]:
        given = {"input": self.input, "weight": self.weight, "bias": self.bias, **self.more, **changes}
        return [ops.matmul_all_reduce(**given, group=dist.group.WORLD, kernel=kernel)]


class Gather(Product):
    """Two weights, the second narrow, and the gathered rows."""

    name = "all-gather"

    def make(self, m: int, k: int, n: int) -> None:
        whole, scale = self.draw(m, k)
        mine = slice(self.rank * self.share, (self.rank + 1) * self.share)
        self.input = torch.zeros(self.share, k, dtype=whole.dtype, device=self.device)
        self.input[: whole[mine].shape[0]] = whole[mine]
        weights = [self.draw(columns, k, k**-0.5) for columns in (n, 32)]
        self.weights = [weight.t() for weight, _ in weights]
        if self.scales == "row":
            padded = torch.ones(self.share, 1, device=self.device)
            padded[: scale[mine].shape[0]] = scale[mine]
        else:
            padded = scale
        self.more = self.options(padded, weight_scales=[s.t() for _, s in weights] if self.scales else None)
        self.expected = [_exact((whole, scale)) @ _exact(weight).t() for weight in weights]
        if self.bias is not None:
            self.expected[0] += self.bias.double()
        self.expected.append(whole.double())

    def run(self, kernel: str = OWN, **changes) -> list[torch.Tensor]:
        given = {"input": self.input, "weights": self.weights, "biases": [self.bias, None], **self.more, **changes}
        common = {"group": dist.group.WORLD, "size": self.sizes[0], "gathered": True, "kernel": kernel}
        return list(ops.all_gather_matmul(**given, **common))


KINDS = (Scatter, Reduce, Gather)


def _numbers(told: list[str]) -> None:
    kinds = [(BF16, ""), (FP16, ""), (FP16, "tensor"), (BF16, "row")]
    for number, (m, k, n) in enumerate([*SIZES, LARGE]):
        for kind, (dtype, scales) in itertools.product(KINDS, kinds):
            if scales and (k % 16 or n % 16):  # of torch's own product, with which it is compared
                continue
            product = kind(m, k, n, dtype, bias=number % 2 == 1, scales=scales)
            allowed = product.allowed()
            for turn in range(2):
                got = product.run()
                if not product.fits(got) or not product.error(got) <= allowed:
                    told.append(f"{product} turn {turn}: {product.errors(got).tolist()}, allowed {allowed:.2g}")
            if not all(map(torch.equal, *([g.view(torch.uint8) for g in product.run()] for _ in range(2)))):
                told.append(f"{product}: other bits the second time")
            if kind is Reduce:
                (got,) = product.run()
                other = got.clone()
                dist.broadcast(other, 0)
                if not torch.equal(got.view(torch.uint8), other.view(torch.uint8)):
                    told.append(f"{product}: other bits than rank 0")


def _tilings(told: list[str]) -> None:
    """Every way to cut the tiles gives the same bits: sums are formed in one order, another only where K is split."""
    for m, k, n in ((257, 200, 264), (1000, 1048, 776), (4096, 1024, 1024)):
        for kind, own in ((Scatter, scatter), (Reduce, scatter), (Gather, gather)):
            product = kind(m, k, n, scales="row" if n == 1024 else "")
            first, allowed = {}, product.allowed()
            for cut in (
                Tiling(192, 3),
                Tiling(128, 4),
                Tiling(128, 4, cluster=2, lead=1),
                Tiling(256, 3, cluster=2, lead=2, pace=0.0, across=3),
                Tiling(128, 4, cluster=2, split=2, lead=1),
                Tiling(256, 2, cluster=2, split=2),
            ):
                with unittest.mock.patch.object(own, "tiling", lambda *_, cut=cut: cut):
                    got = product.run()
                if not product.error(got) <= allowed or not torch.equal(got[0], first.setdefault(cut.split, got[0])):
                    told.append(f"{product} {cut}: {product.errors(got).tolist()}, allowed {allowed:.2g}")


def _layouts(told: list[str]) -> None:
    """Other strides than a linear layer's are copied; rows that are not there stay zero, whatever the bias."""
    product, gathered = Scatter(6, 64, 72, bias=True), Gather(6, 64, 72, bias=True)
    for call in (product, Reduce(6, 64, 72, bias=True), gathered):
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


def _storm(told: list[str], calls: int = STORM_CALLS) -> None:
    """Calls of random sizes without a stop between, each rank late at its own times; graphs replayed among them."""
    shared, mine = random.Random(3), random.Random(dist.get_rank())
    products = [kind(m, k, n, seed=5) for m, k, n in STORM_SIZES for kind in KINDS]
    limits = [p.allowed() for p in products]
    for product in products:
        product.run()
    torch.cuda.synchronize()
    graph, held = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for index in (1, 6, 3, 16, 0, 17, 13):
            held.append((index, products[index].run()))
    wrong = torch.zeros(len(products), dtype=torch.int64, device=here())
    for _ in range(calls):
        if mine.random() < 0.1:
            delay(mine.random() * STORM_DELAY_S)
        if shared.random() < 0.1:
            graph.replay()
            results = held
        else:
            index = shared.randrange(len(products))
            results = [(index, products[index].run())]
        for index, got in results:
            wrong[index] += ~(products[index].errors(got) <= limits[index]).all()
    torch.cuda.synchronize()
    told += [f"storm: {products[i]} was wrong {count} times" for i, count in enumerate(wrong.tolist()) if count]


@contextlib.contextmanager
def _compiled_with(*macros: tuple[str, int]):
    """Kernels that are compiled from now on are compiled with these, too."""

    def extended(options):
        return lambda *arguments, **named: (*options(*arguments, **named), *macros)

    with contextlib.ExitStack() as stack:
        for own in (scatter, gather):
            stack.enter_context(unittest.mock.patch.object(own, "options", extended(own.options)))
        yield


def _everything(rank: int) -> list[str]:
    told: list[str] = []
    for each in (_numbers, _tilings, _layouts, _storm):
        each(told)
    with _compiled_with(("SLOW_WIRE", 3000)):
        _storm(told, SLOW_CALLS)
    torch.cuda.synchronize()
    return told


def _without_waiting(rank: int) -> list[str]:
    """Which kinds of call went wrong."""
    found: list[str] = []
    with _compiled_with(("NO_WAIT", 1), ("SLOW_WIRE", 3000)):
        for kind in KINDS:
            product, told = kind(2048, 2048, 2048), []
            allowed = 0.02
            for _ in range(8):
                if rank == 0:
                    delay(STORM_DELAY_S)
                told.append(product.errors(product.run()) > allowed)
            if torch.stack(told).any().item():
                found.append(kind.name)
    torch.cuda.synchronize()
    return found


@pytest.mark.gpu
def test_gemms_with_collectives():
    for told in spawn(_everything, 2, backend="cuda", timeout_s=240, grace_s=30):
        assert not told, "\n".join(told)


@pytest.mark.gpu
def test_without_waiting_they_go_wrong():
    """The control: the tests above would notice."""
    assert {kind for found in spawn(_without_waiting, 2, backend="cuda", timeout_s=60) for kind in found} == {
        kind.name for kind in KINDS
    }


def _as_a_program(rank: int) -> str:
    told = _everything(rank)
    assert not told, "\n".join(told)
    return "all right"


if __name__ == "__main__":
    under_torchrun(_as_a_program)
