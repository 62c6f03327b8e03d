"""Which kernel computes a GEMM with a collective, and what it cannot do: so far the one that is asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpfuse.comm import arena, workspace
from tpfuse.comm.workspace import Workspace
from tpfuse.errors import ConfigError

NCCL, OWN = "nccl", "tpfuse"


def check_name(op: str, name: str | None) -> None:
    """Raises ConfigError: there is no kernel of that name."""
    if name not in (None, OWN, NCCL):
        raise ConfigError(f"kernel {name!r} cannot run {op}: the kernels are {OWN}, {NCCL}")


def matmul_reduce_scatter(
    kernel: str | None,
    group: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scaled: bool,
    wire_dtype: torch.dtype | None,
    share: int,
) -> torch.Tensor | None:
    """The operation of ``tpfuse.ops`` by the kernel that is asked for; None: by a product and a collective.

    share  rows of each rank
    Raises ConfigError: that kernel cannot do this.
    """
    if kernel in (None, NCCL) or not input.numel():
        return None
    from tpfuse.kernels.cuda import matmul_reduce_scatter as own

    def room(space: Workspace) -> int:
        inner, columns = weight.shape
        return own.most_rows(space, columns, input.dtype, own.tiling(share, columns, inner))

    why = "scales" if scaled else "" if wire_dtype in (None, input.dtype) else f"partial sums in {wire_dtype}"
    space = _workspace("matmul_reduce_scatter", kernel, group, input, [weight], why, room)
    return own.matmul_reduce_scatter(space, input, weight, bias, share)


def all_gather_matmul(
    kernel: str | None,
    group: str,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    rows: int,
    biases: Sequence[torch.Tensor | None],
    scaled: bool,
    gathered: bool,
) -> list[torch.Tensor] | None:
    """As above."""
    if kernel in (None, NCCL) or not input.numel():
        return None
    from tpfuse.kernels.cuda import all_gather_matmul as own

    most = own.MOST_MATRICES
    why = "scales" if scaled else "" if len(weights) <= most else f"more than {most} weights"
    room = lambda space: own.most_rows(space, input.shape[1], input.dtype)  # noqa: E731
    space = _workspace("all_gather_matmul", kernel, group, input, weights, why, room)
    return own.all_gather_matmul(space, input, weights, rows, biases, gathered)


def _workspace(
    op: str,
    kernel: str | None,
    group: str,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    why: str,
    room: Callable[[Workspace], int],
) -> Workspace:
    """What our own kernel works in. Raises ConfigError: another was asked for, or it cannot do this.

    why   a reason that is known already; room: rows that fit into a workspace
    """
    from tpfuse.kernels.cuda import gemm

    for weight in weights:
        why = why or gemm.cannot(input.shape[0], weight.shape[1], input.shape[1], input.dtype)
    space: Workspace | str = why
    if not why:
        made = arena.of(group)
        space = made if isinstance(made, str) else workspace.of(made)
        if not isinstance(space, str) and not room(space):
            space = f"its workspace of {space.arena.bytes >> 20} MiB has no room for a row of tiles (workspace_mb)"
    if isinstance(space, str):
        raise ConfigError(f"kernel {kernel!r} cannot run {op}: {space}")
    return space
