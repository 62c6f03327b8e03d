"""Loggers below ``tpfuse`` in the standard ``logging`` tree, one for each module. Messages begin with the rank.

INFO     what was applied; each compiled graph and what came of it
WARNING  what costs speed, once for a model
DEBUG    each decision, with its reason

Nothing is printed unless the program that imports tpfuse sets logging up (``logging.basicConfig(level="INFO")``).
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist

logging.getLogger("tpfuse").addHandler(logging.NullHandler())


class _Ranked(logging.LoggerAdapter):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        ranked = dist.is_available() and dist.is_initialized()
        return f"[rank {dist.get_rank()}] {msg}" if ranked else msg, kwargs


def logger(name: str) -> logging.LoggerAdapter:
    """The logger of the module of that name."""
    return _Ranked(logging.getLogger(name), {})
