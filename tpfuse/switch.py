"""Off for the calls that are made here and now: ``with tpfuse.disabled():``."""

from __future__ import annotations

import contextlib
import contextvars

import torch

_off: contextvars.ContextVar[bool] = contextvars.ContextVar("tpfuse_disabled", default=False)


class disabled(contextlib.ContextDecorator):
    """Calls of applied models inside run as they did before ``apply``, Hugging Face's ``generate`` included.

        with tpfuse.disabled():
            expected = model(input_ids)

    What was compiled is kept for the calls after it. It nests, ends with an error too, and decorates functions. It holds
    for the thread and the asyncio task that entered it, as ``torch.no_grad`` does: another thread enters its own.
    Inside another ``torch.compile`` an applied model runs as it was anyway, and this does nothing.

    Every rank of a model's groups enters it for the same calls, or their collectives do not meet: ranks then wait for each
    other up to the process group's time-out. ``TPFUSE_DEBUG=1`` makes them compare, and raise AgreementError instead.
    """

    def __init__(self) -> None:
        self._tokens: list[contextvars.Token[bool]] = []

    def _recreate_cm(self) -> disabled:  # of contextlib: each call of a decorated function enters its own
        return disabled()

    def __enter__(self) -> disabled:
        if not torch.compiler.is_compiling():
            self._tokens.append(_off.set(True))
        return self

    def __exit__(self, *error: object) -> None:
        if self._tokens and not torch.compiler.is_compiling():
            _off.reset(self._tokens.pop())


def is_off() -> bool:
    """Whether the caller is inside ``disabled``."""
    return _off.get()
