"""``tpfuse::all_reduce``: the sum over a group where no norm follows, by whatever is fastest for its size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tpfuse.comm import groups
from tpfuse.comm.groups import group_name
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import ALL_REDUCE, BATCH_INVARIANT, DTYPES, check_name
from tpfuse.ops import library
from tpfuse.ops.arguments import check_tensors, told
from tpfuse.ops.library import needs_gradients

NAME = ALL_REDUCE


def reference(input: torch.Tensor, group: str) -> torch.Tensor:
    """What the operation means, as functional collectives."""
    groups.check_device(group, input.device)
    if not input.numel():  # the same on every rank, so there is nothing to exchange
        return input.clone(memory_format=torch.contiguous_format)
    reduced = torch.ops._c10d_functional.all_reduce(input.contiguous(), "sum", group)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def in_rank_order(input: torch.Tensor, group: str) -> torch.Tensor:
    """The same sum, in fp32 and rank order, rounded once: as our kernels sum, whatever the size. For ranks without them."""
    if not input.numel():
        return input.clone(memory_format=torch.contiguous_format)
    parts = torch.ops._c10d_functional.all_gather_into_tensor(input.reshape(1, -1), groups.size(group), group)
    total, *others = torch.ops._c10d_functional.wait_tensor(parts).float()
    for part in others:
        total = total + part
    return total.to(input.dtype).view(input.shape)


def sum_for(kernel_name: str | None) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """The reference's sum where that kernel was asked for: only one promises an order."""
    return in_rank_order if kernel_name == BATCH_INVARIANT else reference


def _run(input, group, kernel_name=None, after=None):
    if input.is_cuda and input.numel():
        found = dispatch.of(group)
        if not isinstance(found, str):
            return found.all_reduce(kernel_name, input)
        dispatch.refuse(NAME, kernel_name, group, found)
    return sum_for(kernel_name)(input, group)


def _fake(input, group, kernel_name=None, after=None):
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


OP = library.define(f"{NAME}(Tensor input, str group, str? kernel_name=None, Tensor? after=None) -> Tensor", _run, _fake)


class Differentiable(torch.autograd.Function):
    """The result is replicated, and so is its gradient, which is that of each rank's part."""

    @staticmethod
    def forward(ctx, input, group, kernel):
        return OP(input, group, kernel)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def all_reduce(input: torch.Tensor, *, group: dist.ProcessGroup | str, kernel: str | None = None) -> torch.Tensor:
    """Sum over the ranks of a group, out of place.

        y = input.clone(); dist.all_reduce(y, group=group); return y

    input    [...]  bf16, fp16 or fp32, a partial sum on each rank
    group    process group, or its name
    kernel   name of the kernel to use on CUDA, None: the one that is measured fastest for this size
    returns  [...]  contiguous, replicated, never an alias of the input

    Our own kernels accumulate in fp32 and rank order, so that all ranks get the same bits; NCCL may round at each step.
    Collective: every rank of the group calls it with the same shape. Safe in CUDA graphs after one call outside a capture.
    Gradients: as tensor parallelism needs them; the result is replicated, so must its gradient be, which is the input's.
    Without an arena (no peer-to-peer memory), and on the CPU, it is the functional collective.
    Raises ValueError: another dtype; GroupError (a ValueError): the group is gone, or not for this device; ConfigError:
    ``kernel`` cannot do this; PeerTimeoutError: a rank did not answer within the process group's time-out.
    """
    check_tensors(NAME, {"input": input})
    if input.dtype not in DTYPES:
        raise ValueError(f"{NAME}: input must be bf16, fp16 or fp32, got {told(input)}")
    check_name(NAME, kernel)
    run = Differentiable.apply if needs_gradients(input) else OP
    return run(input, group_name(group), kernel)
