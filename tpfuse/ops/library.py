"""The ``tpfuse::`` operator namespace.

Operators are defined by ``torch.library`` define + impl rather than by the ``custom_op`` decorator, which costs about
three times the host time on every call (6.5 against 18.7 us).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("tpfuse", "DEF")


def define(schema: str, run: Callable, fake: Callable, *, collective: bool = True) -> torch._ops.OpOverload:
    """Define ``tpfuse::<schema>``, implemented by ``run`` on every device and by ``fake`` for shapes alone.

    collective  other ranks take part: a call whose result is not used stays in a graph, for they may use theirs
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tpfuse::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.tpfuse, name).default
    if collective:
        torch.fx.node.has_side_effect(operator)
    return operator
