"""The all-gather that ranks sharing a GPU use, here on CPU ranks: eager, in a product's reference, and compiled."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tpfuse.ops.matmul import gather_rows
from tpfuse.testing import spawn
from tpfuse.testing.devices import gather_by_gloo


def _gather(rank: int) -> list[list[float]]:
    before = torch.ops._c10d_functional.all_gather_into_tensor.default.has_kernel_for_dispatch_key("CPU")
    gather_by_gloo("CPU")
    assert not before and torch.ops._c10d_functional.all_gather_into_tensor.default.has_kernel_for_dispatch_key("CPU")
    name, found = dist.group.WORLD.group_name, []
    run = torch.compile(gather_rows, backend="aot_eager")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for gather in (gather_rows, run) if dtype is torch.bfloat16 else (gather_rows,):
            shard = torch.tensor([[2.0 * rank, 0], [2.0 * rank + 1, 0]]).to(dtype)
            found.append(gather(shard, 3, name).float()[:, 0].tolist())
    return found


def test_all_gather():
    for found in spawn(_gather, 2, timeout_s=60):
        assert found == [[0.0, 1.0, 2.0]] * 3
