"""The console script ``tpfuse``: ``tpfuse demo ...`` stands for ``torchrun --nproc-per-node 2 -m tpfuse.demo ...``."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from tpfuse.version import __version__

USAGE = """usage: tpfuse [--version] [--help] demo|tune|bench ...

  demo [--nproc-per-node N] ...  compare a tensor-parallel model before and after tpfuse.apply on N ranks (default: 2)
                                 of this machine; 'tpfuse demo --help' lists the other options
  tune [--nproc-per-node N] ...  measure which kernel is the fastest for which size on N GPUs (default: all) of this
                                 machine, or from how many rows on sharding them is, and keep the answer; 'tpfuse tune
                                 --help' lists the other options
  bench NAME [--nproc-per-node N] ...
                                 run benchmarks/NAME.py of a checkout of tpfuse on N GPUs (default: all); 'tpfuse bench'
                                 lists the names, 'tpfuse bench NAME --help' a benchmark's options
"""
BENCHMARKS = ("sweep_all_reduce_rms_norm", "sweep_all_reduce", "dispatch_regret", "decode", "gemm_overlap", "layer_stack")


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
    commands = {"demo": _demo, "tune": _tune, "bench": _bench}
    if command in commands:
        return commands[command](rest)
    known = ", ".join(map(repr, commands))
    print(f"{USAGE}\ntpfuse: unknown command {command!r}; there are {known}", file=sys.stderr)
    return 2


def _demo(args: list[str]) -> int:
    """Check the arguments here, where an error is one line, then start the ranks."""
    from tpfuse.demo import arguments

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    told = "ranks on this machine (default: as many as the mesh has, else 2)"
    parser.add_argument("--nproc-per-node", type=arguments.positive, metavar="N", help=told)
    parsed = arguments.parse(args, prog="tpfuse demo", parents=[parser])
    launch, rest = parser.parse_known_args(args)
    ranks = launch.nproc_per_node or (arguments.ranks(parsed.mesh) if parsed.mesh else 2)
    return _start_ranks(["-m", "tpfuse.demo"], ranks, rest)


def _tune(args: list[str]) -> int:
    from tpfuse.tuner import arguments

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--nproc-per-node",
        type=arguments.positive,
        metavar="N",
        help="ranks, each with a GPU of this machine; a table is for one number of ranks (default: all GPUs)",
    )
    asked = arguments.parse(args, prog="tpfuse tune", parents=[parser])
    launch, rest = parser.parse_known_args(args)
    on_cpu = bool(asked.sequence_parallel)
    return _start_ranks_on_gpus("tune", ["-m", "tpfuse.tuner"], launch.nproc_per_node, rest, on_cpu)


def _bench(args: list[str]) -> int:
    name, rest = (args[0], args[1:]) if args else ("--help", [])
    if name in ("--help", "-h"):
        print(f"usage: tpfuse bench NAME [--nproc-per-node N] ...; NAME is one of {', '.join(BENCHMARKS)}")
        return 0
    if name not in BENCHMARKS:
        print(f"tpfuse bench: no benchmark {name!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    script = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    if not script.exists():
        print(f"tpfuse bench: there is no {script}: benchmarks come with a checkout of tpfuse", file=sys.stderr)
        return 2
    if "--help" in rest or "-h" in rest:
        return subprocess.run([sys.executable, str(script), "--help"], check=False).returncode
    from tpfuse.tuner import arguments

    parser = argparse.ArgumentParser(prog=f"tpfuse bench {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=arguments.positive, metavar="N")
    launch, rest = parser.parse_known_args(rest)
    return _start_ranks_on_gpus("bench", [str(script)], launch.nproc_per_node, rest)


def _start_ranks_on_gpus(command: str, program: list[str], ranks: int | None, args: list[str], on_cpu: bool = False) -> int:
    """As below, each rank with a GPU of this machine, None: as many as there are; 2 where they cannot be had.

    on_cpu  where there are none, on CPU ranks (None: 2 of them)
    """
    import torch

    from tpfuse.tuner import job

    ranks = ranks or torch.cuda.device_count() or (2 if on_cpu else 0)
    why = job.obstacle(ranks, on_cpu)
    if why:
        print(f"tpfuse {command}: {why}", file=sys.stderr)
        return 2
    return _start_ranks(program, ranks, args)


def _start_ranks(program: list[str], ranks: int, args: list[str]) -> int:
    """torchrun on this machine; the exit status of a rank that failed, or 0."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun would set 1 as well, with a warning; more threads than cores make every rank slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    try:
        run.main(["--standalone", "--nproc-per-node", str(ranks), *program, *args])
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)  # below zero: ended by a signal
    return 0


if __name__ == "__main__":
    sys.exit(main())
