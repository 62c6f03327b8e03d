"""The kernels' signalling at 2 to 8 ranks, all on one device: a stream, and an arena in ordinary memory, for each.

Numbers of larger machines without those machines: index arithmetic, slots and epochs are the same, the wire is not. Blocks
are few, so that all ranks' kernels are on the device together.
"""

from __future__ import annotations

import types

import pytest
import torch

from tpfuse.comm.arena import HEADER_BYTES, SENTINEL, layout
from tpfuse.tables import Choice

HIDDEN = (8, 104, 4096, 8192)
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
        arena = types.SimpleNamespace(rank=rank, world=world, device=device, plans={}, split=split, ring=ring)
        arena.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count // world
        arena.peers, arena.base, arena.control = peers.data_ptr(), memory[rank].data_ptr(), control.data_ptr()
        arena.next_base = memory[(rank + 1) % world].data_ptr()
        arena.stream, arena.enter = stream, lambda stream=stream: stream.cuda_stream
        arena.record, arena.kept = record, (memory, peers, control)
        arenas.append(arena)
    return arenas


def _run(arenas, name, inputs, residual, weight):
    """Launch for every rank, then wait for all. The first rank's launch has compiled whatever the others need."""
    from tpfuse.kernels.triton import own

    results = []
    torch.cuda.synchronize()
    for arena, x in zip(arenas, inputs, strict=True):
        with torch.cuda.stream(arena.stream):
            arguments = (name, arena, x, weight, 1e-5, residual)
            results.append(own.all_reduce_rms_norm(*arguments, choice=Choice(name, warps=4, blocks=8)))
    torch.cuda.synchronize()
    assert not arenas[0].record[0], f"a rank gave up waiting: {arenas[0].record.tolist()}"
    return results


def _warm(arenas, like):
    """Fill each stream's allocator: an allocation that reaches the driver may wait for a kernel that spins."""
    for arena in arenas:
        with torch.cuda.stream(arena.stream):
            kept = [torch.empty_like(like) for _ in range(4)]
            kept.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_on_one_device(world):
    arenas = _arenas(world)
    generator = torch.Generator("cuda").manual_seed(world)
    cases = [(name, rows, hidden) for name in ("split", "ring") for rows in (1, 3, 8) for hidden in HIDDEN]
    cases += [("ring", 40, 4096), ("split", 2, 4096), ("ring", 1, 64)]
    for dtype, name, rows, hidden in [(dtype, *case) for dtype in LIMITS for _ in range(2) for case in cases]:
        numbers = torch.randn(world + 2, rows, hidden, device="cuda", generator=generator).to(dtype)
        inputs, residual, weight = numbers[:world], numbers[world], numbers[world + 1, 0]
        _warm(arenas, residual)
        results = _run(arenas, name, inputs, residual, weight)
        total = inputs.double().sum(0) + residual.double()
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
        for got in results:
            for value, expected in zip(got, (normed, total), strict=True):
                error = (value.double() - expected).norm() / expected.norm()
                assert error < LIMITS[dtype], (world, name, rows, hidden, dtype, error.item())
            assert torch.equal(got[0], results[0][0]) and torch.equal(got[1], results[0][1]), "ranks differ in bits"
