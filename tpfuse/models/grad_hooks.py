"""Do in a graph what gradient hooks of Hugging Face's tensor parallelism do outside it.

It puts a full-backward hook on norms that are replicated inside a sharded region (the q and k norms of Qwen3, Qwen3-MoE
and Gemma3), which adds up the ranks' gradients of the norm's weight. ``torch.compile`` breaks the graph at such a hook,
even under ``torch.no_grad()``, where it never fires. So calls of those modules go straight to ``forward`` when gradients
are off, and when a graph is made with gradients on, the graph adds them up. The hooks themselves stay where they are, and
what is not known to be one of these breaks the graph as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist

_OF_HUGGING_FACE = "ReplicatedWithGradAllReduce.install_forward.<locals>._all_reduce_grads"


def bypass(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Install the by-pass on every module that needs it; the list is what ``restore`` takes."""
    bypassed = []
    for module in model.modules():
        if module is not model and _only_has_gradient_hooks(module) and module._compiled_call_impl is None:
            module._compiled_call_impl = _without_gradient_hooks(module)
            bypassed.append(module)
    return bypassed


def restore(bypassed: list[torch.nn.Module]) -> None:
    """Undo ``bypass``."""
    for module in bypassed:
        module._compiled_call_impl = None


def _only_has_gradient_hooks(module: torch.nn.Module) -> bool:
    gradient = module._backward_hooks or module._backward_pre_hooks
    return bool(gradient) and not (module._forward_hooks or module._forward_pre_hooks)


def _without_gradient_hooks(module: torch.nn.Module) -> Callable:
    summed_over, hooks = _group_of_hook(module), _gradient_hooks(module)

    def call(*args, **kwargs):
        if not _only_has_gradient_hooks(module):
            return module._call_impl(*args, **kwargs)
        if not torch.is_grad_enabled():
            return module.forward(*args, **kwargs)
        same = _gradient_hooks(module) == hooks
        if summed_over is None or not same or not torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        given = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        for name, parameter in given.items():
            module._parameters[name] = _SummedGradient.apply(parameter, summed_over)
        try:
            return module.forward(*args, **kwargs)
        finally:
            for name, parameter in given.items():
                module._parameters[name] = parameter

    return call


def _gradient_hooks(module: torch.nn.Module) -> list[Callable]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def _group_of_hook(module: torch.nn.Module) -> str | None:
    """Name of the group over which the module's only hook adds up gradients of its parameters; None: it is another hook."""
    hooks = _gradient_hooks(module)
    plain = all(type(p) is torch.nn.Parameter for p in module.parameters(recurse=False))
    if len(hooks) != 1 or getattr(hooks[0], "__qualname__", "") != _OF_HUGGING_FACE or not plain:
        return None
    group: dist.ProcessGroup = inspect.getclosurevars(hooks[0]).nonlocals["mesh"].get_group()
    return group.group_name


class _SummedGradient(torch.autograd.Function):
    """A parameter whose gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx, parameter, group):
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        summed = torch.ops._c10d_functional.all_reduce(gradient.contiguous(), "sum", ctx.group)
        return torch.ops._c10d_functional.wait_tensor(summed), None
