"""Which kernel computes a GEMM with a collective, and what it cannot do."""

from __future__ import annotations

import torch

from tpfuse.comm import arena, workspace
from tpfuse.errors import ConfigError

NCCL, OWN = "nccl", "tpfuse"


def matmul_reduce_scatter(
    kernel: str | None,
    group: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scaled: bool,
    wire_dtype: torch.dtype | None,
    unit: int,
) -> torch.Tensor | None:
    """The operation of ``tpfuse.ops`` by the kernel that is asked for; None: by a product and a collective.

    Raises ConfigError: that kernel cannot do this.
    """
    if kernel is None or kernel == NCCL or not input.numel():
        return None
    why = _own_cannot(group, input, weight, scaled, wire_dtype) if kernel == OWN else f"the kernels are {OWN}, {NCCL}"
    if why:
        raise ConfigError(f"kernel {kernel!r} cannot run matmul_reduce_scatter: {why}")
    from tpfuse.kernels.cuda import matmul_reduce_scatter as own

    made = arena.of(group)
    assert not isinstance(made, str)
    space = workspace.of(made)
    assert not isinstance(space, str)
    return own.matmul_reduce_scatter(space, input, weight, bias, unit)


def _own_cannot(group: str, input: torch.Tensor, weight: torch.Tensor, scaled: bool, wire_dtype: torch.dtype | None) -> str:
    from tpfuse.kernels.cuda import matmul_reduce_scatter as own

    if scaled or wire_dtype not in (None, input.dtype):
        return "partial sums in another dtype than the input's"
    why = own.cannot(input.shape[0], weight.shape[1], input.shape[1], input.dtype)
    if why:
        return why
    made = arena.of(group)
    if isinstance(made, str):
        return made
    space = workspace.of(made)
    return space if isinstance(space, str) else ""
