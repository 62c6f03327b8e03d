"""Hugging Face ``generate()``: it compiles the decode step by itself when the cache allows it; take that over.

Left alone, ``generate`` would call ``torch.compile(model.__call__)`` with its own backend around an applied model and so
lose every fusion. Instead ``model.get_compiled_call`` answers with the applied model in the mode that ``generate`` wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_NAME = "get_compiled_call"


class CompiledCall:
    """Stands in for ``model.get_compiled_call``.

    Holds the model as an attribute, so that a deep copy or a pickle of the model carries a stand-in for the copy; a copy
    is not applied, and then the stand-in does what the class would do.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, compile_config: Any = None) -> Callable:
        applied = self.model._compiled_call_impl
        config = compile_config or self.model._default_compile_config()
        if not hasattr(applied, "with_options") or config.backend != "inductor":
            return getattr(type(self.model), _NAME)(self.model, compile_config)
        return applied.with_options(
            mode=config.mode, options=config.options, dynamic=config.dynamic, fullgraph=config.fullgraph
        )


def take_over(model: torch.nn.Module) -> None:
    """Let ``generate`` use the applied model where it would have compiled."""
    method = getattr(type(model), _NAME, None)
    if inspect.isfunction(method) and hasattr(model, "_default_compile_config"):
        model.get_compiled_call = CompiledCall(model)  # type: ignore[assignment]


def give_back(model: torch.nn.Module) -> None:
    """Undo ``take_over``."""
    if isinstance(vars(model).get(_NAME), CompiledCall):
        del model.get_compiled_call
