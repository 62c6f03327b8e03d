"""The command line of ``tpfuse tune``."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tpfuse.kernels.candidates import ALL_REDUCE, ALL_REDUCE_RMS_NORM
from tpfuse.kernels.matmul_candidates import MATMULS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MATMUL_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
HIDDEN = (4096, 8192)
ROWS = tuple(1 << n for n in range(14))  # 1 to 8192
MATMUL_ROWS = tuple(1 << n for n in range(6, 15))  # 64 to 16384
OPS = (ALL_REDUCE_RMS_NORM, ALL_REDUCE)
SEQUENCE_PARALLEL_ROWS = tuple(1 << n for n in range(4, 15))  # 16 to 16384
MATMUL_OPS = tuple(MATMULS)
SECONDS = 600


def parse(
    argv: Sequence[str] | None = None, prog: str = "tpfuse.tuner", parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.Namespace:
    """Arguments of the tuner; a bad one ends the process with status 2 before any rank does any work."""
    parser = argparse.ArgumentParser(
        prog=prog,
        parents=list(parents),
        allow_abbrev=False,
        description="Measure which kernel is the fastest for which size on this machine, and keep the answer.",
    )
    _add_sizes(parser)
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        default=SECONDS,
        metavar="BUDGET",
        help=f"start no new size after so long; coarse sizes come first (default: {SECONDS})",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE",
        help="where to write, or the folder (default: the cache, where it is found)",
    )
    parser.add_argument(
        "--libraries",
        action="store_true",
        help="measure, and choose, other libraries' kernels too that need memory of their own",
    )
    parser.add_argument("--fresh", action="store_true", help="forget sizes that were tuned before")
    parser.add_argument("--verbose", action="store_true", help="print what every candidate took")
    args = parser.parse_args(argv)
    _complete(args, parser)
    if args.model is not None:
        try:
            args.hidden = (hidden_size(args.model),)
        except ValueError as error:
            parser.error(f"--model: {error}")
    return args


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--hidden", type=counts, default=HIDDEN, metavar="N,N", help=f"hidden sizes (default: {_listed(HIDDEN)})"
    )
    sizes.add_argument("--model", metavar="FOLDER", help="take the hidden size from the config.json in this folder")
    sizes.add_argument(
        "--sequence-parallel",
        type=shape,
        nargs="+",
        default=(),
        metavar="DxF",
        help="unsharded hidden and intermediate sizes of models: measure instead from how many rows on sharding them "
        "(enable_sp) is faster, with fuse_gemm_comms and without; other tables first, for the models go by them",
    )
    parser.add_argument(
        "--gemm",
        type=shape,
        nargs="+",
        default=(),
        metavar="NxK",
        help="columns and inner dimension, on a rank, of GEMMs with collectives: without --ops, measure those instead",
    )
    parser.add_argument(
        "--rows",
        type=counts,
        metavar="N,N",
        help=f"rows, of GEMMs those of all ranks (default: {_listed(ROWS)}; of GEMMs: {_listed(MATMUL_ROWS)}; of "
        f"--sequence-parallel: {_listed(SEQUENCE_PARALLEL_ROWS)})",
    )
    parser.add_argument(
        "--dtype",
        choices=dict.fromkeys((*DTYPES, *MATMUL_DTYPES)),
        default="bf16",
        help="of what is measured (default: bf16, by which fp16 GEMMs go too); fp8: GEMMs with scales of rows and columns",
    )
    parser.add_argument(
        "--ops",
        type=operations,
        metavar="OP,OP",
        help=f"operations (default: {_listed(OPS)}; with --gemm: {_listed(MATMUL_OPS)})",
    )


def _complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Defaults that depend on one another."""
    args.gemm, args.sequence_parallel = (tuple(dict.fromkeys(each)) for each in (args.gemm, args.sequence_parallel))
    if args.sequence_parallel:
        _complete_sequence_parallel(args, parser)
        return
    args.ops = args.ops or (MATMUL_OPS if args.gemm else OPS)
    args.matmul_rows, args.rows = args.rows or MATMUL_ROWS, args.rows or ROWS
    matmuls = [op for op in args.ops if op in MATMULS]
    if matmuls and not args.gemm:
        parser.error(f"--ops {matmuls[0]}: --gemm says for which sizes")
    if args.gemm and not matmuls:
        parser.error(f"--gemm: --ops names none of {', '.join(MATMULS)}")
    if matmuls and args.dtype not in MATMUL_DTYPES:
        parser.error(f"--dtype {args.dtype}: GEMMs are measured in {_listed(MATMUL_DTYPES)}")
    if len(matmuls) < len(args.ops) and args.dtype not in DTYPES:
        parser.error(f"--dtype {args.dtype}: all-reduces are measured in {_listed(DTYPES)}")


def _complete_sequence_parallel(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    args.rows = args.rows or SEQUENCE_PARALLEL_ROWS
    for name in ("gemm", "ops"):
        if getattr(args, name):
            parser.error(f"--{name}: not with --sequence-parallel, which measures whole blocks")
    if args.dtype not in DTYPES:
        parser.error(f"--dtype {args.dtype}: blocks are measured in {_listed(DTYPES)}")
    widths = [hidden for hidden, _ in args.sequence_parallel]
    if len(set(widths)) < len(widths):
        parser.error(f"--sequence-parallel: one intermediate size for each hidden size, got {_listed(widths)}")


def uneven(args: argparse.Namespace, ranks: int) -> str:
    """Why what is asked for cannot be split over so many ranks; "" if it can."""
    for sizes in args.sequence_parallel:
        if any(size % ranks for size in sizes):
            return f"--sequence-parallel {sizes[0]}x{sizes[1]}: sizes that {ranks} ranks can split evenly are needed"
    return ""


def hidden_size(folder: str) -> int:
    """The hidden size in a checkpoint folder's config.json. Raises ValueError: there is none."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    text = config.get("text_config") if isinstance(config, dict) else None
    for each in (config, text):
        found = each.get("hidden_size") if isinstance(each, dict) else None
        if type(found) is int and found > 0:
            return found
    raise ValueError(f"{path} has no hidden_size")


def counts(text: str) -> tuple[int, ...]:
    """Positive whole numbers between commas, ascending and each once."""
    return tuple(sorted({_positive(int)(part) for part in text.split(",")}))


def shape(text: str) -> tuple[int, int]:
    """N and K of "NxK"."""
    found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be NxK, two numbers above 0, got {text!r}")
    return int(found[1]), int(found[2])


def operations(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in OPS and name not in MATMULS:
            raise argparse.ArgumentTypeError(f"no operation {name!r}; there are {', '.join([*OPS, *MATMULS])}")
    return names


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not number > 0:  # NaN too
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
        return number

    return read


positive = _positive(int)


def _listed(values: Iterable[Any]) -> str:
    return ",".join(map(str, values))
