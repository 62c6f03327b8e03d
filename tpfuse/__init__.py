"""tpfuse: tensor-parallel communication fusions for PyTorch models."""

from tpfuse import environment, ops  # noqa: F401  (environment first: it refuses a torch without what others import)
from tpfuse.api import apply, check, explain, remove
from tpfuse.config import FusionConfig
from tpfuse.errors import (
    AgreementError,
    BuildError,
    ConfigError,
    GroupError,
    LaunchError,
    NotAppliedError,
    PeerTimeoutError,
    StrictError,
    TpfuseError,
    VerificationError,
)
from tpfuse.report import Report, Site
from tpfuse.switch import disabled
from tpfuse.version import __version__
from tpfuse.warming import warmup

__all__ = [
    "AgreementError",
    "BuildError",
    "ConfigError",
    "FusionConfig",
    "GroupError",
    "LaunchError",
    "NotAppliedError",
    "PeerTimeoutError",
    "Report",
    "Site",
    "StrictError",
    "TpfuseError",
    "VerificationError",
    "__version__",
    "apply",
    "check",
    "disabled",
    "explain",
    "ops",
    "remove",
    "warmup",
]
