"""``tpfuse::all_reduce_rms_norm``: all-reduce, bias, scale, residual add and RMSNorm as one operation.

T  tokens (all leading dimensions together)     D  hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from tpfuse.comm.groups import group_name
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM, DTYPES, Wish, check_name
from tpfuse.ops import library
from tpfuse.ops.all_reduce import reference as all_reduce_reference
from tpfuse.ops.all_reduce import sum_for
from tpfuse.ops.arguments import check_floating, check_number, check_tensors, told
from tpfuse.ops.library import needs_gradients
from tpfuse.ops.rms_norm import normalize

NAME = ALL_REDUCE_RMS_NORM


def reference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    group: str,
    eps: float,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    scale_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    sum_over_ranks: Callable[[torch.Tensor, str], torch.Tensor] = all_reduce_reference,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operation means, as functional collectives and eager maths: each step rounds where a plain model rounds."""
    total = sum_over_ranks(input, group)
    if bias is not None:
        total = total + bias
    if scale is not None:
        total = total * scale
    if scale_tensor is not None:
        total = total * scale_tensor
    if residual is not None:
        total = (residual + total).contiguous()
    return normalize(total, weight, eps, weight_offset, normed_dtype, out_dtype), total


def _run(
    input,
    weight,
    group,
    eps,
    residual=None,
    bias=None,
    scale=None,
    scale_tensor=None,
    weight_offset=0.0,
    normed_dtype=None,
    out_dtype=None,
    kernel_name=None,
    flashinfer_bytes=None,
    after=None,
):
    arguments = (residual, bias, scale, scale_tensor, weight_offset, normed_dtype, out_dtype)
    if input.is_cuda and input.numel():
        found = dispatch.of(group)
        if not isinstance(found, str):
            results = found.all_reduce_rms_norm(Wish(kernel_name, flashinfer_bytes), input, weight, eps, *arguments)
            if results is not None:
                return results
        else:
            dispatch.refuse(NAME, kernel_name, group, found)
    return reference(input, weight, group, eps, *arguments, sum_for(kernel_name))


def _fake(
    input,
    weight,
    group,
    eps,
    residual=None,
    bias=None,
    scale=None,
    scale_tensor=None,
    weight_offset=0.0,
    normed_dtype=None,
    out_dtype=None,
    kernel_name=None,
    flashinfer_bytes=None,
    after=None,
):
    total = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return torch.empty(input.shape, dtype=out_dtype or input.dtype, device=input.device), total


OP = library.define(
    f"{NAME}(Tensor input, Tensor? weight, str group, float eps, Tensor? residual=None, Tensor? bias=None, "
    "float? scale=None, Tensor? scale_tensor=None, float weight_offset=0.0, ScalarType? normed_dtype=None, "
    "ScalarType? out_dtype=None, str? kernel_name=None, int? flashinfer_bytes=None, Tensor? after=None) "
    "-> (Tensor, Tensor)",
    _run,
    _fake,
)


class Differentiable(torch.autograd.Function):
    """The sum is kept, and the norm computed from it again; through the sum a gradient goes to each rank's part."""

    @staticmethod
    def forward(ctx, input, weight, residual, bias, group, eps, scale, scale_tensor, weight_offset, *rest):
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.scale = (eps, weight_offset, *rest[:2]), scale
        arguments = (residual, bias, scale, scale_tensor, weight_offset, *rest)
        normed, total = OP(input, weight, group, eps, *arguments)
        ctx.save_for_backward(total, weight, scale_tensor)
        return normed, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, of_normed, of_total):
        total, weight, scale_tensor = ctx.saved_tensors
        of_weight = None
        if of_normed is not None:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (total, weight) if t is not None]
                normed = normalize(leaves[0], leaves[1] if weight is not None else None, *ctx.norm)
            through, *others = torch.autograd.grad(normed, leaves, of_normed)
            of_weight = others[0] if others else None
            of_total = through if of_total is None else of_total + through
        if of_total is None:
            return (None,) * 12
        factor = scale_tensor if ctx.scale is None else ctx.scale
        of_sum = of_total if factor is None else of_total * factor
        of_bias = of_sum.reshape(-1, of_sum.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
        of_residual = of_total if ctx.needs_input_grad[2] else None
        return of_sum, of_weight, of_residual, of_bias, *[None] * 8


def all_reduce_rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    group: dist.ProcessGroup | str,
    eps: float,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    weight_offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of the summed residual stream.

        y = (all_reduce(input) + bias) * scale + residual
        return rms_norm(y) * (weight_offset + weight), y

    input         [..., D]  bf16, fp16 or fp32, a partial sum on each rank
    weight        [D] or None, any floating dtype, replicated
    group         process group, or its name
    eps           added to the mean square, inside the root
    residual      [..., D]  same shape and dtype as input, replicated
    bias          [D], same dtype as input, replicated: added once, after the sum
    scale         number, or a tensor of one element of input's dtype, replicated
    weight_offset 1.0 for Gemma: the weight is widened to fp32 before it is added
    normed_dtype  round the normalised value to this dtype before the weight (Llama), None: keep fp32
    out_dtype     dtype of the normed output, None: input's
    kernel        name of the kernel to use on CUDA, None: the one that is measured fastest for this size
    returns       (normed [..., D], y [..., D] of input's dtype), replicated; neither aliases an argument

    The sum and the norm accumulate in fp32, the sum in rank order: all ranks get the same bits, and get them again.
    Collective: every rank of the group calls it with the same shapes; no tokens at all (T = 0) is allowed and exchanges
    nothing. Safe in CUDA graphs after one call outside a capture, which makes the group's arena. Without an arena (no
    peer-to-peer memory), and on the CPU, functional collectives and eager maths do the same.
    Gradients: the results are replicated, and so must their gradients be; nothing is exchanged for them.
    Raises ValueError: a shape or dtype other than the above, or a scale that requires gradients; GroupError (a
    ValueError): the group is gone, or not for this device; ConfigError: ``kernel`` cannot do this; PeerTimeoutError: a
    rank did not answer within the process group's time-out.
    """
    factor = scale if isinstance(scale, torch.Tensor) else None
    optional = {"weight": weight, "residual": residual, "bias": bias, "scale": factor}
    check_arguments(NAME, input, optional, scale, eps, weight_offset, normed_dtype)
    check_floating(NAME, "out_dtype", out_dtype)
    check_name(NAME, kernel)
    if needs_gradients(factor):
        raise ValueError("all_reduce_rms_norm has no backward for a scale that requires gradients")
    number, element = (scale, None) if factor is None else (None, factor.reshape(()))
    name, rest = group_name(group), (weight_offset, normed_dtype, out_dtype, kernel)
    if needs_gradients(input, weight, residual, bias):
        return Differentiable.apply(input, weight, residual, bias, name, eps, number, element, *rest)
    return OP(input, weight, name, eps, residual, bias, number, element, *rest)


def check_arguments(
    op: str,
    input: torch.Tensor,
    optional: Mapping[str, torch.Tensor | None],
    scale: float | torch.Tensor | None,
    eps: float,
    weight_offset: float,
    normed_dtype: torch.dtype | None,
) -> None:
    """What operations ask of an all-reduce and a norm. Raises ValueError.

    optional  weight, residual, bias and scale, as far as they are tensors
    """
    check_tensors(op, {"input": input}, optional)
    check_number(op, "eps", eps, least=0)
    check_number(op, "weight_offset", weight_offset)
    if scale is not None and optional["scale"] is None:
        check_number(op, "scale", scale)
    check_floating(op, "normed_dtype", normed_dtype)
    _check_shapes(op, input, *(optional[name] for name in ("weight", "residual", "bias", "scale")))


def _check_shapes(
    op: str,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
) -> None:
    """Raises ValueError: a shape, dtype or device that does not go with the input's."""

    def wrong(what: str, given: torch.Tensor) -> ValueError:
        return ValueError(f"{op}: {what}, got {told(given)}")

    if not input.dim():
        raise wrong("input must be [..., D]", input)
    if input.dtype not in DTYPES:
        raise wrong("input must be bf16, fp16 or fp32", input)
    hidden, dtype = input.shape[-1], input.dtype
    if weight is not None and weight.shape != (hidden,):
        raise wrong(f"weight must be [{hidden}]", weight)
    if weight is not None and not weight.is_floating_point():
        raise wrong("weight must be floating", weight)
    if residual is not None and not (residual.shape == input.shape and residual.dtype == dtype):
        raise wrong(f"residual must be {told(input)}", residual)
    if bias is not None and bias.shape != (hidden,):
        raise wrong(f"bias must be [{hidden}]", bias)
    if bias is not None and bias.dtype != dtype:
        raise wrong(f"bias must be {dtype}", bias)
    if factor is not None and not (factor.numel() == 1 and factor.dtype == dtype):
        raise wrong(f"scale must be a number or one element of {dtype}", factor)
    for name, tensor in {"weight": weight, "residual": residual, "bias": bias, "scale": factor}.items():
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"{op}: {name} must be on {input.device} as the input, got one on {tensor.device}")
