"""The ``tpfuse::`` operator namespace.

Operators are defined by ``torch.library`` define + impl rather than by the ``custom_op`` decorator, which costs about
three times the host time on every call (6.5 against 18.7 us).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tpfuse.comm import agreement, groups
from tpfuse.config import is_debugging

_LIBRARY = torch.library.Library("tpfuse", "DEF")


def define(schema: str, run: Callable, fake: Callable, *, collective: bool = True) -> torch._ops.OpOverload:
    """Define ``tpfuse::<schema>``, implemented by ``run`` on every device and by ``fake`` for shapes alone.

    collective  other ranks take part: a call whose result is not used stays in a graph, for they may use theirs
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _compared(schema, run) if collective else run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tpfuse::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.tpfuse, name).default
    if collective:
        torch.fx.node.has_side_effect(operator)
    return operator


def _compared(schema: str, run: Callable) -> Callable:
    """``run``, after the ranks have compared their calls where the environment asks for that (TPFUSE_DEBUG)."""
    name, _, rest = schema.partition("(")
    place = next(n for n, argument in enumerate(rest.split(", ")) if argument == "str group")

    @functools.wraps(run)
    def checked(*arguments: Any) -> Any:
        if _debugging():
            _compare(name, arguments, arguments[place])
        return run(*arguments)

    return checked


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these arguments has to be one that autograd knows."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


_debugging = functools.cache(is_debugging)


def _compare(name: str, arguments: tuple[Any, ...], group: str) -> None:
    """Raise AgreementError on every rank if the ranks of a group make different calls. Not in a graph capture."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    told = ", ".join(_told(argument) for argument in arguments)
    agreement.agree(groups.resolve(group), "a call of tpfuse.ops", {"call": f"{name}({told})"})


def _told(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{argument.dtype} {list(argument.shape)}"
    return f"[{', '.join(map(_told, argument))}]" if isinstance(argument, (list, tuple)) else str(argument)
