"""GEMMs with collectives on CPU ranks: against the whole product in fp64, at every kind of size, layout and dtype."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from tpfuse import ops
from tpfuse.ops.matmul import FP8
from tpfuse.testing import spawn

ROWS = (0, 1, 2, 3, 5, 8, 33)
INNER, COLUMNS = 7, 6
SHAPES = [((rows,), 0) for rows in ROWS] + [((2, 5), 0), ((3, 4), 1), ((2, 3), 1), ((1, 8), 1), ((3, 0), 1), ((2, 3, 4), 2)]


def _whole(world: int, rows: tuple[int, ...], columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(left [*rows, world * K], right [world * K, N], bias [N]), the same on all ranks: small whole numbers."""
    generator = torch.Generator().manual_seed(sum(rows) + columns)
    draw = lambda *shape: torch.randint(-4, 5, shape, generator=generator).float()  # noqa: E731
    return draw(*rows, world * INNER), draw(world * INNER, columns), draw(columns)


def _layouts(weight: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers by rows, by columns, and as columns of a wider matrix."""
    return [weight.contiguous(), weight.t().contiguous().t(), torch.cat((weight, weight), 1)[:, : weight.shape[1]]]


def _share(whole: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """What a rank has of a dimension: as many on every rank, zero where there is none."""
    size = -(-whole.shape[dim] // world)
    index = torch.arange(rank * size, (rank + 1) * size)
    there = index < whole.shape[dim]
    if not whole.shape[dim]:
        return whole.narrow(dim, 0, 0)
    shape = [-1 if d == dim else 1 for d in range(whole.dim())]
    return whole.index_select(dim, index.clamp(max=whole.shape[dim] - 1)) * there.view(shape)


def _equal(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return got.dtype == dtype and got.shape == expected.shape and torch.equal(got.double(), expected.double())


def _row_parallel(rank: int, world: int) -> list[str]:
    group, wrong = dist.group.WORLD, []
    part = slice(rank * INNER, (rank + 1) * INNER)
    for (rows, dim), dtype, with_bias in itertools.product(SHAPES, (torch.float32, torch.bfloat16), (True, False)):
        left, right, bias = _whole(world, rows)
        total = left.double() @ right.double() + (bias.double() if with_bias else 0)
        share = _share(total, dim, rank, world)
        given = {"group": group, "bias": bias.to(dtype) if with_bias else None}
        for layout, weight in enumerate(_layouts(right[part].to(dtype))):
            for wire in (None, torch.float32):
                x = left[..., part].to(dtype)
                # Sums of small whole numbers: exact in fp32, rounded once in bf16.
                got = ops.matmul_reduce_scatter(x, weight, dim=dim, wire_dtype=wire, **given)
                everything = ops.matmul_all_reduce(x, weight, wire_dtype=wire, **given)
                if dtype == torch.float32 or wire == torch.float32:
                    if not _equal(got, share.to(dtype), dtype):
                        wrong.append(f"reduce-scatter {rows} {dim} {dtype} {with_bias} {layout} {wire}")
                    if not _equal(everything, total.to(dtype), dtype):
                        wrong.append(f"all-reduce {rows} {dtype} {with_bias} {layout} {wire}")
                elif got.shape != share.shape or not torch.allclose(got.double(), share, rtol=0.02, atol=1):
                    wrong.append(f"reduce-scatter {rows} {dim} {dtype} {with_bias} {layout} {wire}")
    return wrong


def _column_parallel(rank: int, world: int) -> list[str]:
    group, wrong = dist.group.WORLD, []
    for (rows, dim), dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        left, first, bias = _whole(world, rows)
        _, second, _ = _whole(world, rows, 3)
        shard = _share(left, dim, rank, world).to(dtype)
        for layouts in zip(_layouts(first.to(dtype)), _layouts(second.to(dtype)), strict=True):
            got = ops.all_gather_matmul(
                shard, layouts, group=group, dim=dim, size=rows[dim], biases=[bias.to(dtype), None], gathered=True
            )
            expected = (left.double() @ first.double() + bias.double(), left.double() @ second.double(), left)
            if not all(_equal(g, e.to(dtype), dtype) for g, e in zip(got, expected, strict=True)):
                wrong.append(f"all-gather {rows} {dim} {dtype}")
        (padded,) = ops.all_gather_matmul(shard, first.to(dtype), group=group, dim=dim)
        if padded.shape[dim] != world * shard.shape[dim]:
            wrong.append(f"all-gather {rows} {dim}: padding dropped unasked")
    return wrong


def _fp8(rank: int, world: int) -> list[str]:
    group, wrong, inner = dist.group.WORLD, [], 16
    generator = torch.Generator().manual_seed(5)
    part = slice(rank * inner, (rank + 1) * inner)
    for rows, per_row, kind in itertools.product(((1,), (2,), (4,), (5,), (0,), (2, 3)), (False, True), FP8):
        count = torch.Size(rows).numel()
        left = torch.randn(*rows, world * inner, generator=generator).to(kind)
        right = torch.randn(world * inner, 32, generator=generator).to(FP8[0])
        # A scale of the weight's columns goes with each rank's part of K; here all have the same.
        left_scale = torch.rand(*rows, 1, generator=generator) + 0.5 if per_row else torch.tensor(0.25)
        right_scale = torch.rand(1, 32, generator=generator) + 0.5 if per_row else torch.tensor([2.0])
        total = (left.double() * left_scale.double()) @ (right.double() * right_scale.double())
        given = {"group": group, "out_dtype": torch.bfloat16}
        scales = {"input_scale": left_scale, "weight_scale": right_scale}
        weight = right[part].t().contiguous().t()
        got = ops.matmul_reduce_scatter(
            left[..., part], weight, dim=len(rows) - 1, wire_dtype=torch.float32, **given, **scales
        )
        everything = ops.matmul_all_reduce(left[..., part], weight, **given, **scales)
        shard, shard_scale = _share(left.float(), 0, rank, world).to(kind), left_scale
        if per_row:
            shard_scale = _share(left_scale, 0, rank, world)
        results = ops.all_gather_matmul(
            shard, [right], size=rows[0], input_scale=shard_scale, weight_scales=[right_scale], **given
        )
        pairs = [
            ("reduce-scatter", got, _share(total, len(rows) - 1, rank, world)),
            ("all-reduce", everything, total),
            ("all-gather", results[0], total),
        ]
        for name, value, expected in pairs:
            close = torch.allclose(value.double(), expected, rtol=0.02, atol=0.02 * (expected.abs().max() if count else 0))
            if value.dtype != torch.bfloat16 or value.shape != expected.shape or not close:
                wrong.append(f"{name} {rows} {per_row} {kind}")
    return wrong


def _everything(rank: int) -> list[str]:
    world = dist.get_world_size()
    return _row_parallel(rank, world) + _column_parallel(rank, world) + _fp8(rank, world) + _toy(rank, world)


def _toy(rank: int, world: int) -> list[str]:
    """W = twos(3, 6), x = ones(4, 3) on each of two ranks, bias one, added once: all 13. With three: all 19."""
    got = ops.matmul_all_reduce(torch.ones(4, 3), torch.full((3, 6), 2.0), group=dist.group.WORLD, bias=torch.ones(6))
    return [] if torch.equal(got, torch.full((4, 6), 6.0 * world + 1)) else [f"toy: {got}"]


def test_two_ranks():
    for wrong in spawn(_everything, 2):
        assert not wrong, "\n".join(wrong)


def test_three_ranks():
    for wrong in spawn(_everything, 3):
        assert not wrong, "\n".join(wrong)
