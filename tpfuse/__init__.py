"""tpfuse: tensor-parallel communication fusions for PyTorch models."""

from tpfuse import ops
from tpfuse.api import apply, check, explain, remove
from tpfuse.config import FusionConfig
from tpfuse.errors import (
    AgreementError,
    ConfigError,
    NotAppliedError,
    PeerTimeoutError,
    StrictError,
    TpfuseError,
)
from tpfuse.report import Report, Site
from tpfuse.version import __version__

__all__ = [
    "AgreementError",
    "ConfigError",
    "FusionConfig",
    "NotAppliedError",
    "PeerTimeoutError",
    "Report",
    "Site",
    "StrictError",
    "TpfuseError",
    "__version__",
    "apply",
    "check",
    "explain",
    "ops",
    "remove",
]
