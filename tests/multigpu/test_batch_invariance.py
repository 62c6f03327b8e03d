"""The kernel behind ``batch_invariant``: the same bits for a row alone and among any others.

Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`.

T  rows     D  hidden size
"""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # torchrun puts this file's folder there

from tpfuse import ops
from tpfuse.kernels.candidates import BATCH_INVARIANT
from tpfuse.testing import spawn, under_torchrun

HIDDEN = (100, 2880, 4096, 7168, 8192, 16384)
#: Across what changes by rows: the split kernel's last, more rows than blocks, 4 MiB (what stays in the cache).
ROWS = (2, 3, 32, 33, 128, 264, 265, 300, 1100)
EPS = 1e-5


def _of(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, hidden, device="cuda", generator=generator).to(dtype)


def _differing(run, tokens: list[torch.Tensor], others: list[torch.Tensor], what: str) -> list[str]:
    """Where a row's results are not those of the row alone. Every rank makes the same calls, whatever it finds."""
    alone, found = run(*tokens), []
    for rows in ROWS:
        for place in (0, rows // 2, rows - 1):
            results = run(*(torch.cat([o[:place], t, o[place : rows - 1]]) for t, o in zip(tokens, others, strict=True)))
            wrong = [not torch.equal(r[place : place + 1], a) for r, a in zip(results, alone, strict=True)]
            if any(wrong):
                found.append(f"{what}: {rows} rows, row {place}: {wrong}")
    return found


def _check(rank: int) -> list[str]:
    group, found = dist.group.WORLD, []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden in HIDDEN:
            if hidden * dtype.itemsize > 32 << 10:
                continue
            weight = _of(1, hidden, dtype, 0)[0]
            tokens = [_of(1, hidden, dtype, 1 + rank), _of(1, hidden, dtype, 3)]  # the residual is the same on all ranks
            others = [_of(max(ROWS), hidden, dtype, 4 + rank), _of(max(ROWS), hidden, dtype, 6)]
            norm = lambda x, r, w=weight: ops.all_reduce_rms_norm(  # noqa: E731
                x, w, group=group, eps=EPS, residual=r, kernel=BATCH_INVARIANT
            )
            found += _differing(norm, tokens, others, f"norm {dtype} {hidden}")
            plain = lambda x: (ops.all_reduce(x, group=group, kernel=BATCH_INVARIANT),)  # noqa: E731
            found += _differing(plain, tokens[:1], others[:1], f"sum {dtype} {hidden}")
    return found


def test_any_batch():
    for found in spawn(_check, 2, backend="cuda", timeout_s=300):
        assert not found, found


if __name__ == "__main__":
    under_torchrun(_check)
