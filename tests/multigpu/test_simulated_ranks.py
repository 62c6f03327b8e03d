"""The kernels' signalling at 2 to 8 ranks, with all ranks on one device: a stream, and an arena in ordinary memory, for each.

Numbers of larger machines without those machines: index arithmetic, slots and epochs are the same, the wire is not. Blocks
are few, so that all ranks' kernels are on the device together.
"""

from __future__ import annotations

import types

import pytest
import torch

from tpfuse.comm.arena import HEADER_BYTES, SENTINEL, layout
from tpfuse.tables import Choice

HIDDEN = (8, 100, 4096, 8192)
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-6}


def _arenas(world: int, size: int = 64 << 20) -> list[types.SimpleNamespace]:
    """What ``comm.arena.Arena`` gives kernels, for each of the ranks."""
    device = torch.device("cuda", 0)
    memory = torch.full((world, size // 4), SENTINEL, dtype=torch.int32, device=device)
    memory[:, : HEADER_BYTES // 4] = 0
    peers = torch.tensor([part.data_ptr() for part in memory], dtype=torch.int64, device=device)
    record = torch.zeros(4, dtype=torch.int32).pin_memory()
    split, ring = layout(size, world)
    arenas = []
    for rank in range(world):
        control = torch.tensor([0, int(5e9), record.data_ptr()], dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)
        arenas.append(
            types.SimpleNamespace(
                rank=rank,
                world=world,
                device=device,
                plans={},
                split=split,
                ring=ring,
                peers=peers.data_ptr(),
                base=memory[rank].data_ptr(),
                control=control.data_ptr(),
                record=record,
                stream=stream,
                keep=(memory, peers, control),
                enter=lambda stream=stream: stream.cuda_stream,
            )  # fmt: skip
        )
    return arenas


def _run(arenas, name, inputs, residual, weight):
    """All ranks' launches, then wait. The first round makes plans and fills each stream's allocator: it launches nothing."""
    from tpfuse.kernels.triton import own

    results = []
    torch.cuda.synchronize()
    for arena, x in zip(arenas, inputs, strict=True):
        with torch.cuda.stream(arena.stream):
            arguments = (name, arena, x, weight, 1e-5, residual)
            results.append(own.all_reduce_rms_norm(*arguments, choice=Choice(name, 4, 8)))
    torch.cuda.synchronize()
    assert not arenas[0].record[0], f"a rank gave up waiting: {arenas[0].record.tolist()}"
    return results


def _warm(arenas, shape, dtype):
    """No allocation may reach the driver while a kernel spins: it could wait for that kernel."""
    for arena in arenas:
        with torch.cuda.stream(arena.stream):
            del arena.keep_warm[:]
            arena.keep_warm += [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(4)]
            arena.keep_warm.clear()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_on_one_device(world):
    from tpfuse.kernels.triton import launch

    arenas = _arenas(world)
    for arena in arenas:
        arena.keep_warm = []
    generator = torch.Generator("cuda").manual_seed(world)
    cases = [(name, rows, hidden) for name in ("split", "ring") for rows in (1, 3, 8) for hidden in HIDDEN]
    cases += [("ring", 40, 4096), ("split", 2, 4096), ("ring", 1, 64)]
    for dtype in LIMITS:
        for repeat in range(2):
            for name, rows, hidden in cases:
                _warm(arenas, (rows, hidden + 8), dtype)
                if repeat == 0:  # compile before anything spins
                    per = 16 // dtype.itemsize
                    options = launch.Options(dtype, True, 1, False, False, False, False, False, True)
                    launch.plan(name, arenas[0], rows, -(-hidden // per), options, Choice(name, 4, 8))
                rand = lambda *shape: torch.randn(*shape, device="cuda", generator=generator).to(dtype)  # noqa: E731
                inputs = [rand(rows, hidden) for _ in arenas]
                residual, weight = rand(rows, hidden), rand(hidden)
                results = _run(arenas, name, inputs, residual, weight)
                total = sum(x.double() for x in inputs) + residual.double()
                normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
                for got in results:
                    for value, expected in zip(got, (normed, total), strict=True):
                        error = (value.double() - expected).norm() / expected.norm()
                        assert error < LIMITS[dtype], (world, name, rows, hidden, dtype, error.item())
                    assert torch.equal(got[0], results[0][0]) and torch.equal(got[1], results[0][1]), "ranks differ in bits"
