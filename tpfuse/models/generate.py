"""Hugging Face ``generate()``: where it would compile the model by itself, let it have the applied model instead.

Left alone, ``generate`` would call ``torch.compile(model.__call__)`` with its own backend around an applied model and so
lose every fusion. It does so for the decode steps of a static cache, in CUDA graphs, and takes care that the cache's
buffers keep their addresses: the prefill that allocates them runs eagerly. So it is here. With a compiled prefill,
generation ran at 0.5 to 0.7 of plain ``generate`` on 2x H200, first because CUDA graphs were skipped for buffers that are
not marked as static, and still after they had been marked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tpfuse import switch


class _Method:
    """Stands in for one method of a model.

    A deep copy or a pickle of the model is not applied, and has the method of its class.
    """

    name: str

    def __init__(self, model: Any) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, self.name)  # of a copy that has no attributes yet

    @property
    def applied(self) -> Any:
        """The AppliedModel in front of the model, None if there is none, or none now."""
        found = self.model._compiled_call_impl
        return found if hasattr(found, "with_options") and not switch.is_off() else None

    def original(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class CompiledCall(_Method):
    """``model.get_compiled_call``: the applied model, in the mode that ``generate`` wanted."""

    name = "get_compiled_call"

    def __call__(self, compile_config: Any = None) -> Callable:
        config = compile_config or self.model._default_compile_config()
        excluded = "llama4" in self.model.config.model_type  # Hugging Face does not compile these
        if self.applied is None or config.backend != "inductor" or excluded:
            return self.original(compile_config)
        return self.applied.with_options(
            mode=config.mode, options=config.options, dynamic=config.dynamic, fullgraph=config.fullgraph
        )


class Prefill(_Method):
    """``model._prefill``: as it is, eagerly, where it allocates the buffers that compiled decode steps will use."""

    name = "_prefill"

    def __call__(self, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        layers = getattr(model_kwargs.get("past_key_values"), "layers", ())
        allocates = not all(getattr(layer, "is_initialized", True) for layer in layers)
        if (
            self.applied is not None
            and allocates
            and generation_config.prefill_chunk_size is None
            and self.model._valid_auto_compile_criteria(model_kwargs, generation_config)
        ):
            with self.applied.paused("prefill of a static cache by generate()"):
                return self.original(input_ids, generation_config, model_kwargs, *args, **kwargs)
        return self.original(input_ids, generation_config, model_kwargs, *args, **kwargs)


_METHODS = (CompiledCall, Prefill)


def take_over(model: torch.nn.Module) -> None:
    """Let ``generate`` use the applied model where it would have compiled."""
    if not hasattr(model, "_default_compile_config"):
        return
    for method in _METHODS:
        if inspect.isfunction(getattr(type(model), method.name, None)):
            setattr(model, method.name, method(model))


def give_back(model: torch.nn.Module) -> None:
    """Undo ``take_over``."""
    for method in _METHODS:
        if isinstance(vars(model).get(method.name), method):
            delattr(model, method.name)
