"""Whether the installed torch and its companions are ones that tpfuse can work with."""

from __future__ import annotations

import importlib.metadata

import torch

from tpfuse.errors import ConfigError

OLDEST, TOO_NEW = (2, 11), (2, 15)


def check() -> None:
    """Raises ConfigError: torch is outside the supported range, or an installed package breaks it."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= version < TOO_NEW:
        raise ConfigError(f"torch {torch.__version__} is not supported: tpfuse needs torch>=2.11,<2.15")
    if (torch.version.cuda or "").startswith("13") and _installed("nvidia-nccl-cu12"):
        raise ConfigError(
            "nvidia-nccl-cu12 is installed beside a CUDA 13 build of torch: both write libnccl.so.2, so one has "
            "overwritten the other. Uninstall nvidia-nccl-cu12 and reinstall nvidia-nccl-cu13"
        )


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
