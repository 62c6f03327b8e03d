"""The console script ``tpfuse``: ``tpfuse demo ...`` stands for ``torchrun --nproc-per-node 2 -m tpfuse.demo ...``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tpfuse.version import __version__

USAGE = """usage: tpfuse [--version] [--help] demo ...

  demo [--nproc-per-node N] ...  compare a tensor-parallel model before and after tpfuse.apply on N ranks (default: 2)
                                 of this machine; 'tpfuse demo --help' lists the other options
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status. Unknown commands and options end with status 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(f"tpfuse {__version__}")
        return 0
    if command == "demo":
        return _demo(rest)
    print(f"{USAGE}\ntpfuse: unknown command {command!r}; the only one is 'demo'", file=sys.stderr)
    return 2


def _demo(args: list[str]) -> int:
    """Check the arguments here, where an error is one line, then start the ranks."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from tpfuse import demo

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--nproc-per-node", type=demo.positive, default=2, metavar="N", help="ranks on this machine (default: 2)"
    )
    demo.parse(args, prog="tpfuse demo", parents=[parser])
    launch, rest = parser.parse_known_args(args)
    # torchrun would set 1 as well, with a warning; more threads than cores make every rank slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.nproc_per_node)))
    try:
        run.main(["--standalone", "--nproc-per-node", str(launch.nproc_per_node), "-m", "tpfuse.demo", *rest])
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)  # below zero: ended by a signal
    return 0


if __name__ == "__main__":
    sys.exit(main())
