"""How a fused operation is computed: our own kernels and one adapter per library.

A kernel knows nothing of the operation that uses it. Here it only has a name and a place: which operation on which kind
of device. Where there is none, a graph is left as it was ("no kernel"), except on the CPU, which runs the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One way to compute an operation. ``run`` takes the operation's arguments."""

    name: str
    run: Callable


#: (operation, device type) -> its kernels, best first. Measured dispatch over several of them is the tuner's business.
KERNELS: dict[tuple[str, str], tuple[Kernel, ...]] = {}


def choose(op: str, device_type: str) -> Kernel | None:
    """The kernel to run, or None for the reference."""
    found = KERNELS.get((op, device_type), ())
    return found[0] if found else None


def name_for(op: str, device_type: str) -> str | None:
    """Name of what would run, or None where fusing has nothing to run: then the site must be left alone."""
    kernel = choose(op, device_type)
    if kernel is not None:
        return kernel.name
    return REFERENCE if device_type == "cpu" else None
