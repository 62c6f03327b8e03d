"""Step around gradient hooks while gradients are off.

Hugging Face puts a full-backward hook on norms that are replicated inside a sharded region (the q and k norms of Qwen3,
Qwen3-MoE and Gemma3). Under ``torch.no_grad()`` such a hook never fires, but ``torch.compile`` breaks the graph at it. So
calls of those modules go straight to ``forward`` when gradients are off, and through the hook when they are on. The hooks
themselves stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


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
    def call(*args, **kwargs):
        if torch.is_grad_enabled() or not _only_has_gradient_hooks(module):
            return module._call_impl(*args, **kwargs)
        return module.forward(*args, **kwargs)

    return call
