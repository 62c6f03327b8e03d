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
FP32_WIRE = [TILINGS[0], Tiling(192, 2, cluster=2)]  # for partial sums in fp32 there is less room
MORE_K = 136  # of a second product, which is added
BYTES_OF_PEER = 1200 << 10  # so that the largest of the sizes is done in parts
LIMIT = 6e-3  # of bf16: a rounding of each partial sum, and of the result


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


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_on_one_device(world, monkeypatch):
    arenas = _arenas(world)
    spaces, generator = _spaces(arenas), torch.Generator("cuda").manual_seed(world)
    draw = lambda *shape: torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)  # noqa: E731
    for own in (scatter, gather):
        monkeypatch.setattr(own, "kernel_of", _built)
    for (m, k, n), cut in itertools.product(SIZES, [*TILINGS, *FP32_WIRE[1:]]):
        share = -(-m // world)
        _warm(arenas, [(share, n), (world * share, n), (world * share, k), (world * share, 32)])
        parts = [(draw(m, k), draw(n, k) * (k * world) ** -0.5) for _ in range(world)]
        bias = draw(n)
        total = sum(left.double() @ right.double().t() for left, right in parts) + bias.double()
        whole = torch.nn.functional.pad(total, (0, 0, 0, world * share - m))

        def scattered(space, rank, all_rows=False, wire_dtype=None, parts=parts, bias=bias, share=share, cut=cut):
            (left, right), how = parts[rank], {"all_rows": all_rows, "wire_dtype": wire_dtype, "cut": cut}
            return scatter.matmul_reduce_scatter(space, left, right.t(), bias, share, **how)

        got = torch.cat(_run(spaces, scattered))
        assert _error(got, whole) < LIMIT and not got[m:].any(), (world, m, k, n, cut)
        everywhere = _run(spaces, lambda space, rank: scattered(space, rank, True))
        assert all(torch.equal(each, got[:m]) for each in everywhere), (world, m, k, n, cut)
        if cut in FP32_WIRE:
            exact = torch.cat(_run(spaces, lambda space, rank: scattered(space, rank, wire_dtype=torch.float32)))
            once = _error(whole.bfloat16(), whole)
            assert _error(exact, whole) < 1.02 * once and not exact[m:].any(), (world, m, k, n, cut)
            assert m < 100 or _error(got, whole) > 1.05 * once
            everywhere = _run(spaces, lambda space, rank: scattered(space, rank, True, torch.float32))
            assert all(torch.equal(each, exact[:m]) for each in everywhere), (world, m, k, n, cut)

        further = [(draw(m, MORE_K), draw(n, MORE_K) * (MORE_K * world) ** -0.5) for _ in range(world)]
        total = sum(left.double() @ right.double().t() for left, right in (*parts, *further)) + bias.double()
        whole = torch.nn.functional.pad(total, (0, 0, 0, world * share - m))

        def summed(space, rank, all_rows, wire=None, parts=parts, further=further, bias=bias, share=share, cut=cut):
            (left, right), (other, weight) = parts[rank], further[rank]
            first, second = right.t().contiguous(), weight.t().contiguous()  # as a backward has them
            arguments = (space, left, first, bias, share, None, None, ([other], [second]), wire)
            return scatter.matmul_reduce_scatter(*arguments, all_rows=all_rows, cut=cut)

        got = torch.cat(_run(spaces, lambda space, rank: summed(space, rank, False)))
        assert _error(got, whole) < LIMIT and not got[m:].any(), (world, m, k, n, cut)
        everywhere = _run(spaces, lambda space, rank: summed(space, rank, True))
        assert all(torch.equal(each, got[:m]) for each in everywhere), (world, m, k, n, cut)
        if cut in FP32_WIRE:
            exact = torch.cat(_run(spaces, lambda space, rank: summed(space, rank, False, torch.float32)))
            once = _error(whole.bfloat16(), whole)
            assert _error(exact, whole) < 1.02 * once and not exact[m:].any(), (world, m, k, n, cut)

        rows = torch.nn.functional.pad(parts[0][0], (0, 0, 0, world * share - m)).view(world, share, k)
        weights = [parts[0][1].t(), draw(32, k).t()]

        def gathered(space, rank, rows=rows, weights=weights, m=m, cut=cut):
            return gather.all_gather_matmul(space, rows[rank], weights, m, [None, None], True, cut=cut)

        for results in _run(spaces, gathered):
            *products, copy = results
            assert torch.equal(copy, parts[0][0])
            for product, weight in zip(products, weights, strict=True):
                assert _error(product, copy.double() @ weight.double()) < LIMIT, (world, m, k, n, cut)
