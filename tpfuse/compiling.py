"""What an applied model asks of torch.compile: checked options, an entry whose graphs can be freed, and room for graphs."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import difflib
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo.utils import guard_failures

from tpfuse.errors import ConfigError, first_line

#: Graphs per variant before Dynamo gives up and runs eagerly. Prefill and decode, with two kinds of cache, in static and
#: dynamic shapes, already make the eight that are its default.
_RECOMPILE_LIMIT = 64
_entries = itertools.count()


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Arguments for torch.compile.

    key   tells two sets apart within this process
    told  the same in words that are alike on every rank: objects by their kind, not by their address
    """

    values: Mapping[str, Any]
    key: str
    told: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CompileOptions:
        return cls(dict(values), repr(sorted(values.items())), repr(sorted((k, _told(v)) for k, v in values.items())))

    def check(self) -> None:
        """Raises ConfigError: torch.compile would refuse them, at the first call."""
        mode, options = self.values.get("mode"), self.values.get("options")
        for name, allowed in (("fullgraph", (True, False)), ("dynamic", (True, False, None))):
            if not any(self.values.get(name, False) is each for each in allowed):
                told = " or ".join(map(str, allowed))
                raise ConfigError(f"{name} must be {told}, as in torch.compile, got {self.values[name]!r}")
        if mode and options:
            raise ConfigError("mode and options exclude each other, as in torch.compile")
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"options must be a dict, as in torch.compile, got {type(options).__name__}")
        for name in options or ():
            known = torch._inductor.list_options()
            if str(name).replace("-", "_") not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise ConfigError(f"options: Inductor has no option {name!r}; the nearest valid one is {near!r}")
        try:
            torch._TorchCompileInductorWrapper(mode, dict(options) if options else None, self.values.get("dynamic"))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"torch.compile refuses mode and options: {first_line(error)}") from error


def _told(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((str(name), _told(inner)) for name, inner in value.items())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


def entry(model: torch.nn.Module) -> types.FunctionType:
    """A function that calls the model and has a code object and a name of its own.

    Dynamo keeps compiled graphs per code object, and what it learnt about inputs (this size, or this epsilon, varies) per
    name: one model must not make the next one's hidden size dynamic. Graphs know the model by the name of its variable here
    (``places.ENTRY_VARIABLE``).
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    name = f"{type(model).__name__}_{next(_entries)}"
    code = forward.__code__.replace(co_name=name)
    variables = {"__name__": __name__, "__builtins__": builtins}  # Dynamo puts what it compiles among them
    return types.FunctionType(code, variables, name, forward.__defaults__, forward.__closure__)


def forget(code: types.CodeType, variables: dict[str, Any], backend: Callable) -> None:
    """Free what Dynamo has compiled for an entry that is gone.

    Left alone, it keeps that for as long as it keeps the code object, which it keeps for as long as that. And c10d's flight
    recorder remembers the code that its last some thousand collectives were called by: that code must hold no graphs.
    """
    eval_frame.remove_from_cache(code)
    for name in variables:
        variables[name] = None  # Dynamo deletes them itself, with the code
    guard_failures.pop(code, None)
    for key, kept in list(eval_frame.cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend:
            del eval_frame.cached_backends[key]


@contextlib.contextmanager
def room_for_graphs() -> Iterator[None]:
    """Raise Dynamo's limit of graphs per function for the length of a call (set by hand: its own patch costs 25 us)."""
    config: Any = torch._dynamo.config
    before = config.recompile_limit
    config.recompile_limit = max(before, _RECOMPILE_LIMIT)
    try:
        yield
    finally:
        config.recompile_limit = before
