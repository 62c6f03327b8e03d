"""``tpfuse::act_mul``: the one form of gated activations, silu(gate) * up and gelu(gate) * up.

It exists at compile time only: what no fusion takes is lowered back to the operations it came from.

D  intermediate size
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tpfuse.ops import library

ACTIVATIONS = ("silu", "gelu_tanh")


def activate(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up, the activation rounded to the dtype of gate first, as models do.

    gate, up  [..., D]  the same floating dtype
    act       "silu" or "gelu_tanh"
    """
    activated = functional.silu(gate) if act == "silu" else functional.gelu(gate, approximate="tanh")
    return activated * up


def _fake(gate, up, act):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


OP = library.define("act_mul(Tensor gate, Tensor up, str act) -> Tensor", activate, _fake, collective=False)
