"""GEMMs with collectives at 2 to 8 ranks, all on one device, as test_simulated_ranks.py does it for all-reduces.

M  rows     K  inner dimension of each rank     N  columns     S  rows of one rank
"""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch

from tests.multigpu.test_simulated_ranks import _arenas
from tpfuse.comm.workspace import DATA_OFFSET
from tpfuse.kernels.cuda import all_gather_matmul as gather
from tpfuse.kernels.cuda import build
from tpfuse.kernels.cuda import matmul_reduce_scatter as scatter
from tpfuse.kernels.cuda.gemm import Tiling

SIZES = [(5, 64, 72), (300, 520, 264), (2000, 1024, 776)]
TILINGS = [Tiling(128, 4, lead=1), Tiling(192, 4, cluster=2), Tiling(256, 3), Tiling(256, 3, cluster=2, lead=2, across=3)]
TILINGS += [Tiling(128, 4, 2, split=2, lead=1), Tiling(256, 3, 2, split=2, across=3)]
FP32_WIRE = [Tiling(128, 4, lead=1), Tiling(192, 2, cluster=2), Tiling(256, 2, cluster=2, split=2)]
MORE_K = 136  # of a second product, which is added
BYTES_OF_PEER = 1200 << 10  # so that the largest of the sizes is done in parts
LIMIT = 6e-3  # of bf16: a rounding of each partial sum, and of the result
ONCE = 1.02  # with partial sums in fp32: no more than rounding the exact result


class Space(types.SimpleNamespace):
    """What ``comm.workspace.Workspace`` gives kernels."""

    def data(self, dtype, shape):
        return self.memory[DATA_OFFSET // 4 :].view(dtype)[: math.prod(shape)].view(shape)


def _spaces(arenas):
    size = BYTES_OF_PEER * (len(arenas) - 1)
    memory = torch.zeros(len(arenas), (DATA_OFFSET + size) // 4, dtype=torch.int32, device="cuda")
    bases = [part.data_ptr() for part in memory]
    for arena in arenas:
        arena.aborted = torch.zeros((), dtype=torch.bool, device="cuda")
    return [
        Space(
            arena=arena, bytes=size, profile=None, memory=part, base=bases[arena.rank],
            peers=[*bases[arena.rank + 1 :], *bases[: arena.rank]],
        )
        for arena, part in zip(arenas, memory, strict=True)
    ]  # fmt: skip


def _built(space, files, macros, shared_bytes):
    return build.kernel(files, macros, shared_bytes, 0)


def _run(spaces, call):
    """call(space, rank) of every rank, then wait for all. Twice: kernels and memory are there the second time."""
    for _ in range(2):
        results = []
        for rank, space in enumerate(spaces):
            with torch.cuda.stream(space.arena.stream):
                results.append(call(space, rank))
        torch.cuda.synchronize()
        record = spaces[0].arena.record
        assert not record[0], f"a rank gave up waiting: {record.tolist()}"
    return results


def _warm(arenas, sizes):
    """Allocate on each stream, and load torch's kernels: what reaches the driver may wait for a kernel that spins."""
    for arena in arenas:
        with torch.cuda.stream(arena.stream):
            kept = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes for _ in range(3)]
            kept[0][:1] = torch.where(arena.aborted, torch.nan, kept[1][:1])
            kept.clear()
    torch.cuda.synchronize()


def _error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


class Numbers:
    """Operands of every rank, a bias, and the exact sum of their products."""

    def __init__(self, world, sizes):
        self.world, (self.m, self.k, self.n) = world, sizes
        self.share, self.generator = -(-self.m // world), torch.Generator("cuda").manual_seed(world)
        self.parts = [self.pair(self.k) for _ in range(world)]
        self.further = [self.pair(MORE_K) for _ in range(world)]  # products that are added
        self.bias = self.draw(self.n)

    def draw(self, *shape):
        return torch.randn(shape, device="cuda", generator=self.generator).to(torch.bfloat16)

    def pair(self, inner):
        return self.draw(self.m, inner), self.draw(self.n, inner) * (inner * self.world) ** -0.5

    def padded(self, rows):
        return torch.nn.functional.pad(rows, (0, 0, 0, self.world * self.share - self.m))

    def exact(self, several):
        pairs = self.parts + self.further if several else self.parts
        return self.padded(sum(left.double() @ right.double().t() for left, right in pairs) + self.bias.double())


def _check_sums(spaces, numbers, cut, several, wire_dtype=None):
    """Reduce-scatter, and the same bits from an all-reduce. several: two products, whose weights lie as in a backward."""
    told, expected = (len(spaces), numbers.m, numbers.k, numbers.n, cut, several, wire_dtype), numbers.exact(several)

    def call(all_rows):
        def run(space, rank):
            (left, right), (other, weight) = numbers.parts[rank], numbers.further[rank]
            first, more = right.t(), ((), ())
            if several:
                first, more = first.contiguous(), ([other], [weight.t().contiguous()])
            arguments = (space, left, first, numbers.bias, numbers.share, None, None, more, wire_dtype)
            return scatter.matmul_reduce_scatter(*arguments, all_rows=all_rows, cut=cut)

        return _run(spaces, run)

    got = torch.cat(call(False))
    once = _error(expected.bfloat16(), expected)
    assert _error(got, expected) < (LIMIT if wire_dtype is None else ONCE * once), told
    if wire_dtype is None and numbers.m > 100:  # else few numbers
        assert _error(got, expected) > ONCE * once, told
    assert not got[numbers.m :].any(), told
    assert all(torch.equal(each, got[: numbers.m]) for each in call(True)), told


def _check_gathered(spaces, numbers, cut):
    rows = numbers.padded(numbers.parts[0][0]).view(numbers.world, numbers.share, numbers.k)
    weights = [numbers.parts[0][1].t(), numbers.draw(32, numbers.k).t()]
    both = [None, None]
    for results in _run(
        spaces,
        lambda space, rank: gather.all_gather_matmul(space, rows[rank], weights, numbers.m, both, True, cut=cut),
    ):
        *products, copy = results
        assert torch.equal(copy, numbers.parts[0][0])
        for product, weight in zip(products, weights, strict=True):
            assert _error(product, copy.double() @ weight.double()) < LIMIT, (numbers.world, copy.shape, cut)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_on_one_device(world, monkeypatch):
    arenas = _arenas(world)
    spaces = _spaces(arenas)
    for own in (scatter, gather):
        monkeypatch.setattr(own, "kernel_of", _built)
    for sizes in SIZES:
        numbers = Numbers(world, sizes)
        share, n, k = numbers.share, numbers.n, numbers.k
        _warm(arenas, [(share, n), (world * share, n), (world * share, k), (world * share, 32)])
        for cut in TILINGS:
            for several in (False, True):
                _check_sums(spaces, numbers, cut, several)
            _check_gathered(spaces, numbers, cut)
        for cut, several in itertools.product(FP32_WIRE, (False, True)):
            _check_sums(spaces, numbers, cut, several, torch.float32)
