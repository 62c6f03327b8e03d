"""The ``tpfuse::`` operator namespace.

Operators are defined by ``torch.library`` define + impl rather than by the ``custom_op`` decorator, which costs about
three times the host time on every call (6.5 against 18.7 us).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpfuse.comm import agreement, groups
from tpfuse.config import is_annotating, is_debugging
from tpfuse.ops.arguments import told

_LIBRARY = torch.library.Library("tpfuse", "DEF")
#: The last argument of every operation: where it stands in the model, None where no profile asks for it.
SITE = "site"


def define(schema: str, run: Callable, fake: Callable, *, collective: bool = True) -> torch._ops.OpOverload:
    """Define ``tpfuse::<schema>``, implemented by ``run`` on every device and by ``fake`` for shapes alone.

    collective  other ranks take part: a call whose result is not used stays in a graph, for they may use theirs
    One more argument, ``site``, which neither of the two gets, names calls in profiles.
    """
    name, _, rest = schema.partition("(")
    arguments, _, returns = rest.partition(") -> ")
    parameters = arguments.split(", ")
    _LIBRARY.define(f"{name}({arguments}, str? {SITE}=None) -> {returns}")
    _LIBRARY.impl(name, _called(name, parameters, run, collective), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tpfuse::{name}", _without_site(len(parameters), fake), lib=_LIBRARY)
    operator = getattr(torch.ops.tpfuse, name).default
    if collective:
        torch.fx.node.has_side_effect(operator)
    return operator


def has_site(target: Any) -> bool:
    """Whether it is an operation of ours, which takes the name of a place."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == _LIBRARY.ns


def _called(name: str, parameters: list[str], run: Callable, collective: bool) -> Callable:
    """``run``, after the ranks have compared their calls, and within a range that profilers show, where the environment
    asks for that (TPFUSE_DEBUG, TPFUSE_NVTX)."""
    count = len(parameters)
    group = parameters.index("str group") if collective else 0

    @functools.wraps(run)
    def called(*arguments: Any) -> Any:  # the dispatcher leaves defaults out from the end
        site = None
        if len(arguments) > count:
            *given, site = arguments
            arguments = tuple(given)
        if collective and _debugging():
            _compare(name, arguments, arguments[group])
        if site is None and not _annotating():
            return run(*arguments)
        with _range(f"tpfuse {name} {site or ''}".rstrip()):
            return run(*arguments)

    return called


def _without_site(count: int, fake: Callable) -> Callable:
    @functools.wraps(fake)
    def called(*arguments: Any, site: str | None = None, **named: Any) -> Any:
        return fake(*arguments[:count], **named)

    return called


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    """A range that torch's profiler shows, and NVTX (Nsight Systems) where there are GPUs."""
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these arguments has to be one that autograd knows."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


_debugging, _annotating = functools.cache(is_debugging), functools.cache(is_annotating)


def _compare(name: str, arguments: tuple[Any, ...], group: str) -> None:
    """Raise AgreementError on every rank if the ranks of a group make different calls. Not in a graph capture."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    given = ", ".join(_told(argument) for argument in arguments)
    agreement.agree(groups.resolve(group), "a call of tpfuse.ops", {"call": f"{name}({given})"})


def _told(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return told(argument)
    return f"[{', '.join(map(_told, argument))}]" if isinstance(argument, (list, tuple)) else str(argument)
