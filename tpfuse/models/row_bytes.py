"""How large a row of a model's hidden states is, from the model alone: the same on all ranks that have the same model."""

from __future__ import annotations

import collections
from typing import Any

import torch


def row_bytes(model: torch.nn.Module) -> int | None:
    """Bytes per row: hidden size times the size of an element. None: neither can be told.

    The hidden size is Hugging Face's ``config.hidden_size`` (or that of its ``text_config``), else the commonest length of
    the vectors with "norm" in their names, the largest of several. An element is one of the commonest dtype of the
    floating-point parameters that are no FP8.
    """
    hidden, dtypes = _configured(model) or _normed(model), collections.Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
            dtypes[parameter.dtype] += parameter.numel()
    if hidden is None or not dtypes:
        return None
    return hidden * max(dtypes, key=lambda dtype: (dtypes[dtype], str(dtype))).itemsize


def _configured(model: torch.nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        size = getattr(each, "hidden_size", None)
        if type(size) is int and size > 0:
            return size
    return None


def _normed(model: torch.nn.Module) -> int | None:
    norms = (p for name, p in model.named_parameters() if "norm" in name.lower() and p.dim() == 1)
    lengths = collections.Counter(p.shape[0] for p in norms)
    return max(lengths, key=lambda length: (lengths[length], length), default=None)
