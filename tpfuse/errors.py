"""Every error that tpfuse raises on purpose.

All of them derive from :class:`TpfuseError`, so that the code which sits between a compiler and the user can hand them
through unwrapped, and from the built-in type that a caller would expect.
"""


class TpfuseError(Exception):
    """Base of all tpfuse errors."""


class ConfigError(TpfuseError, ValueError):
    """A configuration field is unknown, has a bad value, or asks for what cannot be honoured here."""


class GroupError(ConfigError):
    """A process group was destroyed or never made, does not have this rank, or cannot carry this device's tensors."""


class AgreementError(TpfuseError, RuntimeError):
    """The ranks of one process group asked tpfuse for different things, or one of them failed."""


class BuildError(TpfuseError, RuntimeError):
    """A kernel could not be compiled or loaded."""


class LaunchError(TpfuseError, RuntimeError):
    """The driver refuses a kernel of ours, or an operand, on this rank."""


class StrictError(TpfuseError, RuntimeError):
    """Strict mode: a fusion that was asked for found no place in the model."""


class NotAppliedError(TpfuseError, ValueError):
    """``explain`` was given a model to which ``apply`` was never applied."""


class PeerTimeoutError(TpfuseError, RuntimeError):
    """A kernel waited for a rank that did not answer in time. What it waited for is NaN; the group cannot be used
    again."""


class VerificationError(TpfuseError, RuntimeError):
    """``verify``: an operation of a rewritten graph gives something else than the graph as it was, or ranks differ in what
    they compare. The same message on every rank of the group."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line: its own first, or its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
