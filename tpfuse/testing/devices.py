"""A GPU for each rank, or one for several of them."""

from __future__ import annotations

import functools
import os

import torch

from tpfuse.comm.symmetric import SHARE_VARIABLE


def take_device(rank: int, ranks: int) -> str:
    """Make a GPU the current one for a rank, one of so many on this machine. Returns the backend of groups over them.

    "nccl", if there are enough of them. Otherwise ranks share GPUs, and it is "gloo", for NCCL refuses that: kernels that
    use peers' memory work, but at some milliseconds for each time that one waits for a peer, whose turn has to come.
    """
    devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % max(1, devices))
    if ranks <= devices:
        return "nccl"
    os.environ[SHARE_VARIABLE] = "1"
    gather_by_gloo("CUDA")
    return "gloo"


@functools.cache
def gather_by_gloo(key: str) -> torch.library.Library:
    """Functional all-gathers of that dispatch key's tensors by what gloo has for GPUs, too.

    torch calls gloo's coalesced all-gather for them, which reads a GPU's memory as the host's and crashes (2.11).
    """
    ops = torch.ops._c10d_functional

    def gather(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
        out = input.new_empty((group_size * input.shape[0], *input.shape[1:]))
        return ops.all_gather_into_tensor_out(input.contiguous(), group_size, group_name, out=out)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, key)
    return library
