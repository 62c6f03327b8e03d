"""Whether the installed torch and its companions are ones that tpfuse can work with."""

from __future__ import annotations

import importlib.metadata
import re

import torch

from tpfuse.errors import ConfigError

OLDEST, TOO_NEW = (2, 11), (2, 15)


def check_import() -> None:
    """Raises ImportError: this torch does not even have what tpfuse imports."""
    if _version() < OLDEST:
        raise ImportError(_unsupported())
    if not torch.distributed.is_available():
        raise ImportError(f"tpfuse needs a torch that was built with torch.distributed, torch {torch.__version__} was not")


def check() -> None:
    """Raises ConfigError: torch is outside the supported range, or an installed package breaks it."""
    if not OLDEST <= _version() < TOO_NEW:
        raise ConfigError(_unsupported())
    if (torch.version.cuda or "").startswith("13") and _installed("nvidia-nccl-cu12"):
        raise ConfigError(
            "nvidia-nccl-cu12 is installed beside a CUDA 13 build of torch: both write libnccl.so.2, so one has "
            "overwritten the other. Uninstall nvidia-nccl-cu12 and reinstall nvidia-nccl-cu13"
        )


def _version() -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _unsupported() -> str:
    oldest, too_new = (".".join(map(str, each)) for each in (OLDEST, TOO_NEW))
    return f"torch {torch.__version__} is not supported: tpfuse needs torch>={oldest},<{too_new}"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


check_import()
